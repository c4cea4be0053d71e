"""ddl from Python, for notebooks and checks: numpy arrays, and whatever speaks DLPack, in and out, without a copy.

    make && cc -O2 -std=c11 -fPIC -shared -I. -o build/libddl.so build/ddl.c -lpthread -ldl
    PYTHONPATH=examples/python build/ddlrun -n 4 python3 my.py

    import ddl, numpy
    with ddl.Context() as job:
        total = job.all_reduce(numpy.full(3, job.rank, numpy.float32))

Nothing is installed and nothing built; the module opens libddl.so (DDL_PYTHON_LIBRARY, else beside this file, else in build/).
Arrays may be strided. `out` is made when it is not given. A status that is an error raises ddl.Error with the sentence."""
import ctypes
import os
import pathlib

import numpy

_TYPES = {"float16": 1, "float32": 3, "float64": 4, "int8": 5, "uint8": 6, "int32": 7, "uint32": 8, "int64": 9,
          "uint64": 10, "bool": 11,
          "bfloat16": 2, "float8_e4m3fn": 16, "float8_e5m2": 17}  # the last three: arrays of ml_dtypes
_OPS = {"sum": 1, "prod": 2, "min": 3, "max": 4, "avg": 5, "band": 6, "bor": 7, "bxor": 8, "land": 9, "lor": 10,
        "lxor": 11}
_P, _I = ctypes.c_void_p, ctypes.c_int32


class Error(RuntimeError):
    """status is its name ("DDL_ERR_PEER"); the text is ddl's sentence."""

    def __init__(self, status, text):
        super().__init__(text)
        self.status = status


class Tensor(ctypes.Structure):
    """ddl_tensor: a view."""
    _fields_ = [("data", _P), ("dtype", _I), ("device", _I), ("ndim", _I), ("shape", ctypes.c_int64 * 8),
                ("strides", ctypes.c_int64 * 8)]


class _Info(ctypes.Structure):
    _fields_ = [("source", _I), ("tag", _I), ("count", ctypes.c_int64), ("status", _I)]


def _library():
    here = pathlib.Path(__file__).resolve().parent
    for path in (os.environ.get("DDL_PYTHON_LIBRARY"), here / "libddl.so", here.parent.parent / "build" / "libddl.so"):
        if path and pathlib.Path(path).exists():
            lib = ctypes.CDLL(str(path))
            lib.ddl_world.restype = _P
            lib.ddl_world.argtypes = lib.ddl_rank.argtypes = lib.ddl_size.argtypes = [_P]
            lib.ddl_error.restype = lib.ddl_status_name.restype = ctypes.c_char_p
            lib.ddl_error.argtypes, lib.ddl_status_name.argtypes = [_P], [_I]
            return lib
    raise ImportError("there is no libddl.so: see the head of " + __file__)


def array(x):
    """x as a numpy array on the same memory; a list or number becomes a new one."""
    return x if isinstance(x, numpy.ndarray) else numpy.from_dlpack(x) if hasattr(x, "__dlpack__") else numpy.asarray(x)


def view(a):
    """The ddl_tensor of an array."""
    if a.dtype.name not in _TYPES:
        raise TypeError(f"ddl has no type {a.dtype.name}; it has {', '.join(_TYPES)}")
    if a.ndim > 8 or any(s % a.itemsize for s in a.strides):
        raise TypeError("ddl has 8 dimensions, and strides of whole elements")
    t = Tensor(a.ctypes.data, _TYPES[a.dtype.name], 0, a.ndim)
    t.shape[:a.ndim] = a.shape
    t.strides[:a.ndim] = [s // a.itemsize for s in a.strides]
    return t


def _longs(values):
    return (ctypes.c_int64 * len(values))(*values)


class Context:
    """One rank of a job; rank and world from the environment, as ddl_init(NULL) takes them."""

    def __init__(self):
        self._lib, self._context = _library(), _P()
        status = self._lib.ddl_init(None, ctypes.byref(self._context))
        if status < 0:
            raise Error(self._lib.ddl_status_name(status).decode(), "ddl_init failed; ddl has said why on stderr")
        self._world = self._lib.ddl_world(self._context)
        self.rank, self.size = self._lib.ddl_rank(self._world), self._lib.ddl_size(self._world)

    def close(self):
        if self._context:
            self._lib.ddl_finalize(ctypes.byref(self._context))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def _call(self, name, *args):
        if not self._context:
            raise Error("DDL_ERR_STATE", f"{name}: the context is closed")
        status = getattr(self._lib, name)(_P(self._world), *args)
        if status < 0:
            raise Error(self._lib.ddl_status_name(status).decode(), self._lib.ddl_error(self._context).decode())

    def _into(self, out, like, shape):
        out = numpy.empty(shape, like.dtype) if out is None else array(out)
        if out.dtype != like.dtype or not out.flags.writeable:
            raise TypeError(f"out must be writeable and of type {like.dtype}")
        return out

    def _op(self, op):
        if op not in _OPS:
            raise ValueError(f"op is one of {', '.join(_OPS)}")
        return _I(_OPS[op])

    # In the order of the header. `x` is an array of this rank; of root alone where the call says so.

    def barrier(self):
        self._call("ddl_barrier")

    def broadcast(self, x, root=0):
        x = array(x)
        x = self._into(x, x, x.shape)
        self._call("ddl_broadcast", view(x), _I(root))
        return x

    def reduce(self, x, root=0, op="sum", out=None):
        x = array(x)
        out = self._into(out, x, x.shape)
        self._call("ddl_reduce", view(x), view(out), self._op(op), _I(root))
        return out if self.rank == root else None

    def all_reduce(self, x, op="sum", out=None):
        return self._alike("ddl_all_reduce", x, out, self._op(op))

    def all_reduce_many(self, arrays, op="sum"):
        """All in place, and as one operation: for many small ones."""
        if not all(isinstance(a, numpy.ndarray) and a.flags.writeable for a in arrays):
            raise TypeError("all_reduce_many works in place, on writeable numpy arrays")
        self._call("ddl_all_reduce_many", (Tensor * len(arrays))(*map(view, arrays)), _I(len(arrays)), self._op(op))
        return arrays

    def all_reduce_scalar(self, value, op="sum"):
        """Of a number, as f64."""
        x = ctypes.c_double(value)
        self._call("ddl_all_reduce_scalar", ctypes.byref(x), self._op(op))
        return x.value

    def scan(self, x, op="sum", out=None):
        return self._alike("ddl_scan", x, out, self._op(op))

    def exscan(self, x, op="sum", out=None):
        """Of rank 0 out stays as it is: zeros when it was not given."""
        x = array(x)
        return self._alike("ddl_exscan", x, numpy.zeros(x.shape, x.dtype) if out is None else out, self._op(op))

    def all_to_all(self, x, out=None):
        """Part r of the first dimension goes to rank r."""
        return self._alike("ddl_all_to_all", x, out)

    def _alike(self, name, x, out, *more):
        x = array(x)
        out = self._into(out, x, x.shape)
        self._call(name, view(x), view(out), *more)
        return out

    def gather(self, x, root=0, out=None):
        x = array(x)
        out = self._into(out, x, (self.size, *x.shape))
        self._call("ddl_gather", view(x), view(out), _I(root))
        return out if self.rank == root else None

    def scatter(self, x, root=0, out=None):
        """x: of all ranks (size, ...); root's is used. Returns this rank's row."""
        x = array(x)
        out = self._into(out, x, x.shape[1:])
        self._call("ddl_scatter", view(x), view(out), _I(root))
        return out

    def all_gather(self, x, out=None):
        x = array(x)
        out = self._into(out, x, (self.size, *x.shape))
        self._call("ddl_all_gather", view(x), view(out))
        return out

    def reduce_scatter(self, x, op="sum", out=None):
        """x: (size, ...). Returns this rank's row of the sum."""
        x = array(x)
        out = self._into(out, x, x.shape[1:])
        self._call("ddl_reduce_scatter", view(x), view(out), self._op(op))
        return out

    # The v-forms: counts[r] elements belong to rank r; one dimension.

    def gatherv(self, x, counts, root=0, out=None):
        x = array(x)
        out = self._into(out, x, sum(counts))
        self._call("ddl_gatherv", view(x), view(out), _longs(counts), None, _I(root))
        return out if self.rank == root else None

    def scatterv(self, x, counts, root=0, out=None):
        x = array(x)
        out = self._into(out, x, counts[self.rank])
        self._call("ddl_scatterv", view(x), view(out), _longs(counts), None, _I(root))
        return out

    def all_gatherv(self, x, counts, out=None):
        x = array(x)
        out = self._into(out, x, sum(counts))
        self._call("ddl_all_gatherv", view(x), view(out), _longs(counts), None)
        return out

    def reduce_scatterv(self, x, counts, op="sum", out=None):
        x = array(x)
        out = self._into(out, x, counts[self.rank])
        self._call("ddl_reduce_scatterv", view(x), view(out), _longs(counts), self._op(op))
        return out

    def all_to_allv(self, x, send_counts, recv_counts, out=None):
        x = array(x)
        out = self._into(out, x, sum(recv_counts))
        self._call("ddl_all_to_allv", view(x), _longs(send_counts), None, view(out), _longs(recv_counts), None)
        return out

    def send(self, x, peer, tag=0):
        self._call("ddl_send", view(array(x)), _I(peer), _I(tag))

    def send_recv(self, x, to, out, source, send_tag=0, recv_tag=0):
        """Both at once; returns the number of elements that came into out."""
        info, out = _Info(), array(out)
        self._call("ddl_send_recv", view(array(x)), _I(to), _I(send_tag), view(self._into(out, out, out.shape)),
                   _I(source), _I(recv_tag), ctypes.byref(info))
        return info.count

    def recv(self, out, peer, tag=0):
        """Into out; returns the number of elements that came."""
        info, out = _Info(), array(out)
        self._call("ddl_recv", view(self._into(out, out, out.shape)), _I(peer), _I(tag), ctypes.byref(info))
        return info.count
