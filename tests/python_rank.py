"""What test_python.py runs on each rank: every collective of examples/python/ddl.py against numpy."""
import ddl
import numpy


def of(rank, shape=(6,), dtype=numpy.float32):
    """Integers, so that sums are exact."""
    return (numpy.arange(numpy.prod(shape)).reshape(shape) * 3 + rank * 7 + 1).astype(dtype)


def same(what, got, expected):
    if got is None or got.dtype != expected.dtype or got.shape != expected.shape or not (got == expected).all():
        raise AssertionError(f"{what}: {got} is not {expected}")


def raises(kind, call, *args, **more):
    try:
        call(*args, **more)
    except kind as error:
        return error
    raise AssertionError(f"{call} did not raise {kind}")


class Foreign:
    """An array of somebody else, known by DLPack alone."""

    def __init__(self, a):
        self.a = a

    def __dlpack__(self, **_):
        return self.a.__dlpack__()

    def __dlpack_device__(self):
        return self.a.__dlpack_device__()


with ddl.Context() as job:
    me, n = job.rank, job.size
    everybody = [of(r) for r in range(n)]
    for dtype in ddl._TYPES:
        if dtype not in ("bool", "bfloat16", "float8_e4m3fn", "float8_e5m2"):
            same(dtype, job.all_reduce(of(me, dtype=dtype)), sum(of(r, dtype=dtype) for r in range(n)).astype(dtype))
    for dtype, one, two in (("bfloat16", 0x3f80, 0x4000), ("float8_e4m3fn", 0x38, 0x40), ("float8_e5m2", 0x3c, 0x40)):
        bits = numpy.uint16 if one > 255 else numpy.uint8  # ml_dtypes need not be here: 1.0 and 2.0 by their bits
        raw = numpy.full(5, two if me == 1 else one, bits)
        t = ddl.view(raw.view(numpy.uint8))
        t.dtype, t.shape[0] = ddl._TYPES[dtype], len(raw)
        job._call("ddl_all_reduce", t, t, job._op("max"))
        same(dtype, raw, numpy.full(5, two, bits))
    for op, plain in (("sum", sum), ("max", numpy.maximum.reduce), ("min", numpy.minimum.reduce),
                      ("prod", numpy.multiply.reduce), ("avg", lambda x: sum(x) / numpy.float32(n))):
        same(op, job.all_reduce(of(me), op), plain(everybody).astype(numpy.float32))
    bits = [of(r, dtype=numpy.uint32) for r in range(n)]
    for op, plain in (("band", numpy.bitwise_and), ("bor", numpy.bitwise_or), ("bxor", numpy.bitwise_xor)):
        same(op, job.all_reduce(bits[me], op), plain.reduce(bits))
    truth = [numpy.array([r > 0, r == 1, True, False]) for r in range(n)]
    for op, plain in (("land", numpy.logical_and), ("lor", numpy.logical_or), ("lxor", numpy.logical_xor)):
        same(op, job.all_reduce(truth[me], op), plain.reduce(truth))
    many = [of(me), of(me, (2, 3), numpy.int32)]
    job.all_reduce_many(many)
    same("all_reduce_many", many[0], sum(everybody))
    same("all_reduce_many", many[1], sum(of(r, (2, 3), numpy.int32) for r in range(n)))
    if job.all_reduce_scalar(me + 0.5, "max") != n - 0.5:
        raise AssertionError("all_reduce_scalar")
    into = numpy.zeros(6, numpy.float32)
    if job.send_recv(of(me), (me + 1) % n, into, (me - 1) % n, 3, 3) != 6:
        raise AssertionError("send_recv: not 6 elements came")
    same("send_recv", into, of((me - 1) % n))
    raises(TypeError, job.all_reduce_many, [[1.0]])
    same("bool", job.broadcast(numpy.array([True, False] if me == 1 else [False, False]), 1), numpy.array([True, False]))
    same("broadcast", job.broadcast(of(me), n - 1), of(n - 1))
    root = n - 1
    for name, expected in (("reduce", sum(everybody)), ("gather", numpy.stack(everybody))):
        got = getattr(job, name)(of(me), root=root)
        if me == root:
            same(name, got, expected)
        elif got is not None:
            raise AssertionError(f"{name} gives something to rank {me}")
    same("all_gather", job.all_gather(of(me)), numpy.stack(everybody))
    wide = [of(r, (n, 5), numpy.float64) for r in range(n)]
    same("scatter", job.scatter(wide[me], root=1), wide[1][me])
    same("reduce_scatter", job.reduce_scatter(wide[me]), sum(wide)[me])
    same("all_to_all", job.all_to_all(wide[me]), numpy.stack([wide[r][me] for r in range(n)]))
    same("scan", job.scan(of(me)), sum(everybody[:me + 1]))
    same("exscan", job.exscan(of(me)), sum(everybody[:me], numpy.zeros(6, numpy.float32)))
    counts = [r + 1 for r in range(n)]
    parts, whole = [of(r, (r + 1,)) for r in range(n)], of(0, (sum(counts),))
    at = sum(counts[:me])
    same("all_gatherv", job.all_gatherv(parts[me], counts), numpy.concatenate(parts))
    got = job.gatherv(parts[me], counts, root=0)
    same("gatherv", got if me == 0 else numpy.concatenate(parts), numpy.concatenate(parts))
    same("scatterv", job.scatterv(whole, counts, root=2 % n), whole[at:at + counts[me]])
    same("reduce_scatterv", job.reduce_scatterv(whole, counts), whole[at:at + counts[me]] * n)
    sent = numpy.concatenate([numpy.full(me + 1, 10 * me + r, numpy.int64) for r in range(n)])
    same("all_to_allv", job.all_to_allv(sent, [me + 1] * n, counts),
         numpy.concatenate([numpy.full(r + 1, 10 * r + me, numpy.int64) for r in range(n)]))
    strided = numpy.full((4, 6), -7, numpy.float32)
    strided[:, ::2] = of(me, (4, 3))
    job.all_reduce(strided[:, ::2], out=strided[:, ::2])
    same("strided", strided[:, ::2], sum(of(r, (4, 3)) for r in range(n)))
    same("between", strided[:, 1::2], numpy.full((4, 3), -7, numpy.float32))
    same("DLPack in", job.all_reduce(Foreign(of(me))), sum(everybody))
    same("DLPack out", numpy.from_dlpack(job.all_reduce(of(me))), sum(everybody))
    if me == 0:
        job.send(of(0), 1, tag=4)
    elif me == 1:
        into = numpy.zeros(10, numpy.float32)
        if job.recv(into, 0, tag=4) != 6:
            raise AssertionError("not 6 elements came")
        same("recv", into[:6], of(0))
    job.barrier()
    raises(TypeError, job.all_reduce, numpy.zeros(3, numpy.complex64))
    raises(TypeError, job.all_reduce, of(me), out=numpy.zeros(6, numpy.float64))
    raises(ValueError, job.all_reduce, of(me), op="mean")
    error = raises(ddl.Error, job.send, of(me), 99)
    if error.status != "DDL_ERR_ARG" or "99" not in str(error):
        raise AssertionError(f"{error.status}: {error}")
raises(ddl.Error, job.barrier)
print(f"rank {me} is done")
