// csrc/ptx/bulk.cuh for kernels on the host: of a GPU without bulk copies.
#pragma once

#define MOECOMM_HAS_BULK 0
