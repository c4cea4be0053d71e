/* gloo: the Gloo column, Gloo's own C++ interface over its TCP transport, without torch around it.
 *
 * Gloo has two generations of algorithms and both are measured, since neither is the fastest everywhere:
 *   "gloo"      the functions that torch.distributed calls (gloo::allreduce and its like): a thread of the device
 *               waits in epoll and moves the data, the caller sleeps on a condition variable;
 *   "gloo-sync" (DDL_BENCH_GLOO=sync) the older algorithm classes, with pairs in synchronous busy-polling mode: the
 *               caller moves the data itself. It is what Gloo's own benchmark calls --sync --busy-poll, the best it
 *               has for latency. Only all_reduce exists in this form.
 * Gloo has no launcher: ranks find each other through RANK, WORLD_SIZE and the folder DDL_BENCH_STORE. */
#include "measure.h"

#include <gloo/allgather.h>
#include <gloo/allreduce.h>
#include <gloo/allreduce_halving_doubling.h>
#include <gloo/alltoall.h>
#include <gloo/barrier.h>
#include <gloo/barrier_all_to_all.h>
#include <gloo/broadcast.h>
#include <gloo/math.h>
#include <gloo/reduce.h>
#include <gloo/reduce_scatter.h>
#include <gloo/rendezvous/context.h>
#include <gloo/rendezvous/file_store.h>
#include <gloo/transport/tcp/device.h>

#include <memory>
#include <string>
#include <vector>

namespace {

struct Member {
    std::shared_ptr<gloo::rendezvous::Context> context;
    bool synchronous = false;
    std::unique_ptr<gloo::Algorithm> barrier;
    /* The algorithm classes are built for one buffer and run often: kept for as long as the buffer stays. */
    std::unique_ptr<gloo::Algorithm> algorithm;
    const void *built_for = nullptr;
    size_t built_count = 0;
};

template <typename Make>
void run_algorithm(Member *member, const void *buffer, size_t count, Make make) {
    if (member->built_for != buffer || member->built_count != count) {
        member->algorithm.reset();
        member->algorithm = make();
        member->built_for = buffer;
        member->built_count = count;
    }
    member->algorithm->run();
}

void all_reduce(Member *member, float *data, size_t count) {
    if (member->synchronous) {
        run_algorithm(member, data, count, [&] {
            return std::unique_ptr<gloo::Algorithm>(new gloo::AllreduceHalvingDoubling<float>(
                member->context, std::vector<float *>{data}, static_cast<int>(count)));
        });
        return;
    }
    gloo::AllreduceOptions options(member->context);
    options.setOutput(data, count);
    options.setReduceFunction(
        static_cast<void (*)(void *, const void *, const void *, size_t)>(&gloo::sum<float>));
    gloo::allreduce(options);
}

void broadcast(Member *member, float *data, size_t count) {
    gloo::BroadcastOptions options(member->context);
    options.setOutput(data, count);
    options.setRoot(0);
    gloo::broadcast(options);
}

void reduce(Member *member, float *in, float *out, size_t count) {
    gloo::ReduceOptions options(member->context);
    options.setInput(in, count);
    options.setOutput(out, count);
    options.setRoot(0);
    options.setReduceFunction(
        static_cast<void (*)(void *, const void *, const void *, size_t)>(&gloo::sum<float>));
    gloo::reduce(options);
}

void all_gather(Member *member, float *in, float *out, size_t count) {
    gloo::AllgatherOptions options(member->context);
    options.setInput(in, count);
    options.setOutput(out, count * static_cast<size_t>(member->context->size));
    gloo::allgather(options);
}

/* Gloo reduces in place and leaves the rank's block at the front of the input; the copy to `out` is part of what its
 * user pays for a result in a buffer of its own. */
void reduce_scatter(Member *member, float *in, float *out, size_t count) {
    const int ranks = member->context->size;
    run_algorithm(member, in, count, [&] {
        return std::unique_ptr<gloo::Algorithm>(new gloo::ReduceScatterHalvingDoubling<float>(
            member->context, std::vector<float *>{in}, static_cast<int>(count) * ranks,
            std::vector<int>(static_cast<size_t>(ranks), static_cast<int>(count))));
    });
    memcpy(out, in, count * sizeof(float));
}

void all_to_all(Member *member, float *in, float *out, size_t count) {
    const size_t all = count * static_cast<size_t>(member->context->size);
    gloo::AlltoallOptions options(member->context);
    options.setInput(in, all);
    options.setOutput(out, all);
    gloo::alltoall(options);
}

void ping_pong(Member *member, float *in, float *out, size_t count) {
    const int rank = member->context->rank;
    if (rank > 1) {
        return;
    }
    auto from = member->context->createUnboundBuffer(in, count * sizeof(float));
    auto to = member->context->createUnboundBuffer(out, count * sizeof(float));
    to->recv(1 - rank, 1);
    if (rank == 0) {
        from->send(1, 1);
    }
    to->waitRecv();
    if (rank == 1) {
        from->send(0, 1);
    }
    from->waitSend();
}

int bench_gloo_sync(void *state) {
    Member *member = static_cast<Member *>(state);
    if (member->synchronous) {
        member->barrier->run();
        return 0;
    }
    gloo::BarrierOptions options(member->context);
    gloo::barrier(options);
    return 0;
}

int bench_gloo_run(void *state, bench_op op, float *in, float *out, size_t count) {
    Member *member = static_cast<Member *>(state);
    if (member->synchronous && op != BENCH_ALL_REDUCE) {
        fprintf(stderr, "gloo-sync: Gloo has only all_reduce in synchronous mode\n");
        return -1;
    }
    switch (op) {
    case BENCH_ALL_REDUCE:
        all_reduce(member, out, count);
        return 0;
    case BENCH_BROADCAST:
        broadcast(member, out, count);
        return 0;
    case BENCH_ALL_GATHER:
        all_gather(member, in, out, count);
        return 0;
    case BENCH_REDUCE_SCATTER:
        reduce_scatter(member, in, out, count);
        return 0;
    case BENCH_ALL_TO_ALL:
        all_to_all(member, in, out, count);
        return 0;
    case BENCH_PING_PONG:
        ping_pong(member, in, out, count);
        return 0;
    case BENCH_REDUCE:
        reduce(member, in, out, count);
        return 0;
    case BENCH_BARRIER:
        return bench_gloo_sync(member);
    default:
        return -1;
    }
}

int number(const char *name) {
    const char *text = getenv(name);
    return text == nullptr ? -1 : atoi(text);
}

void join(Member *member, int rank, int ranks) {
    gloo::transport::tcp::attr address("127.0.0.1");
    auto device = gloo::transport::tcp::CreateDevice(address);
    gloo::rendezvous::FileStore store(getenv("DDL_BENCH_STORE"));
    member->context = std::make_shared<gloo::rendezvous::Context>(rank, ranks);
    member->context->connectFullMesh(store, device);
    const char *mode = getenv("DDL_BENCH_GLOO");
    member->synchronous = mode != nullptr && std::string(mode) == "sync";
    if (!member->synchronous) {
        return;
    }
    for (int i = 0; i < ranks; i++) {
        if (i != rank) {
            member->context->getPair(i)->setSync(true, true);
        }
    }
    member->barrier.reset(new gloo::BarrierAllToAll(member->context));
}

} // namespace

int main(int argc, char **argv) {
    const int rank = number("RANK");
    const int ranks = number("WORLD_SIZE");
    if (rank < 0 || ranks < 1 || getenv("DDL_BENCH_STORE") == nullptr) {
        fprintf(stderr, "gloo: set RANK, WORLD_SIZE and DDL_BENCH_STORE (an empty folder that the ranks share)\n");
        return 2;
    }
    try {
        Member member;
        join(&member, rank, ranks);
        bench_peer peer = {rank, ranks, &member, bench_gloo_sync, bench_gloo_run};
        return bench_main(&peer, argc, argv);
    } catch (const std::exception &failure) {
        fprintf(stderr, "gloo: rank %d: %s\n", rank, failure.what());
        return 1;
    }
}
