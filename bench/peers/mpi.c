/* mpi: the MPI column (Open MPI or MPICH, whichever mpicc builds it). What a program that follows the standard would
 * call: blocking collectives, in place where the operation is. Which transport MPI uses is decided by its launcher's
 * flags. */
#define _GNU_SOURCE
#include "measure.h"
#include <mpi.h>

static int bench_mpi_sync(void *state) {
    (void)state;
    return MPI_Barrier(MPI_COMM_WORLD);
}

static int bench_mpi_ping_pong(float *in, float *out, int count) {
    int rank = 0;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    if (rank > 1) {
        return 0;
    }
    if (rank == 0 && MPI_Send(in, count, MPI_FLOAT, 1, 7, MPI_COMM_WORLD) != MPI_SUCCESS) {
        return -1;
    }
    if (MPI_Recv(out, count, MPI_FLOAT, 1 - rank, 7, MPI_COMM_WORLD, MPI_STATUS_IGNORE) != MPI_SUCCESS) {
        return -1;
    }
    return rank == 1 ? MPI_Send(in, count, MPI_FLOAT, 0, 7, MPI_COMM_WORLD) : 0;
}

static int bench_mpi_run(void *state, bench_op op, float *in, float *out, size_t elements) {
    int count = (int)elements;
    (void)state;
    switch (op) {
    case BENCH_ALL_REDUCE:
        return MPI_Allreduce(MPI_IN_PLACE, out, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    case BENCH_BROADCAST:
        return MPI_Bcast(out, count, MPI_FLOAT, 0, MPI_COMM_WORLD);
    case BENCH_ALL_GATHER:
        return MPI_Allgather(in, count, MPI_FLOAT, out, count, MPI_FLOAT, MPI_COMM_WORLD);
    case BENCH_REDUCE_SCATTER:
        return MPI_Reduce_scatter_block(in, out, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    case BENCH_ALL_TO_ALL:
        return MPI_Alltoall(in, count, MPI_FLOAT, out, count, MPI_FLOAT, MPI_COMM_WORLD);
    case BENCH_PING_PONG:
        return bench_mpi_ping_pong(in, out, count);
    case BENCH_REDUCE:
        return MPI_Reduce(in, out, count, MPI_FLOAT, MPI_SUM, 0, MPI_COMM_WORLD);
    case BENCH_BARRIER:
        return MPI_Barrier(MPI_COMM_WORLD);
    default:
        return -1;
    }
}

int main(int argc, char **argv) {
    bench_peer peer = {.sync = bench_mpi_sync, .run = bench_mpi_run};
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &peer.rank);
    MPI_Comm_size(MPI_COMM_WORLD, &peer.ranks);
    int rc = bench_main(&peer, argc, argv);
    if (rc != 0) {
        MPI_Abort(MPI_COMM_WORLD, rc); /* a finalize would wait for ranks that are stuck in the failed operation */
    }
    MPI_Finalize();
    return 0;
}
