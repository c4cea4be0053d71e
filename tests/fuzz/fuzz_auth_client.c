/* libFuzzer target: the handshake as client, facing hostile bytes and a bent honest server.
 *     clang -std=c11 -O1 -g -fsanitize=fuzzer,address,undefined tests/fuzz/fuzz_auth_client.c -o fuzz_auth_client
 *     ./fuzz_auth_client tests/fuzz/corpus/auth_client */
#include "fuzz_auth.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    fuzz_run(data, size, 0);
    return 0;
}
