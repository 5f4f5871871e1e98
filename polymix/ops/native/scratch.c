/* How much memory the kernels allocate for themselves. */

#include <stdint.h>

_Thread_local int64_t scratch_bytes;

/* The bytes of the buffers of this thread's last call, apart from those of depthwise convolutions. */
int64_t scratch_of_last_call(void) { return scratch_bytes; }
