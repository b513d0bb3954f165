// Macros that let host compilers and nvcc compile the same code.
#pragma once

#if defined(__CUDACC__)
#define MOECOMM_HD __host__ __device__
#else
#define MOECOMM_HD
#endif
