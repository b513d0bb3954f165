// What host compilers and nvcc must agree on.
#pragma once

#if defined(__CUDACC__)
#define MOECOMM_HD __host__ __device__
#else
#define MOECOMM_HD
#endif
