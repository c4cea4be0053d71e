/* libFuzzer target: the handshake as server, facing hostile bytes and a bent honest client.
 * campaign: parser max_len=384 */
#include "fuzz_auth.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    fuzz_run(data, size, 1);
    return 0;
}
