/* libFuzzer target: the handshake as client, facing hostile bytes and a bent honest server.
 * campaign: parser max_len=384 */
#include "fuzz_auth.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    fuzz_run(data, size, 0);
    return 0;
}
