/* libFuzzer target: the handshake as server, facing hostile bytes and a bent honest client.
 *     clang -std=c11 -O1 -g -fsanitize=fuzzer,address,undefined tests/fuzz/fuzz_auth_server.c -o fuzz_auth_server
 *     ./fuzz_auth_server tests/fuzz/corpus/auth_server */
#include "fuzz_auth.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    fuzz_run(data, size, 1);
    return 0;
}
