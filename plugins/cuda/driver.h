/* driver: the CUDA driver, libcuda.so.1, opened when it is used. Types, constants and functions have the names of the
 * CUDA Driver API, whose documentation says what they do; only what this plugin uses is here. They are declared anew
 * because neither the toolkit nor its headers are needed to compile or to run this; tests compare them with cuda.h.
 *
 * Each function is looked up by the name of its ABI ("cuMemAlloc_v2"), which never changes its meaning, so that one
 * build works with every driver from CUDA 11.8 on. There is no CUDA runtime (libcudart) in this plugin. */
#ifndef CUDA_DRIVER_H
#define CUDA_DRIVER_H

#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { CUDA_DRIVER_OLDEST = 11080 }; /* as cuDriverGetVersion says it: 1000 * major + 10 * minor */

/* ---- types ---- */

typedef int CUresult;
typedef int CUdevice;
typedef unsigned long long CUdeviceptr;
typedef unsigned long long CUmemGenericAllocationHandle;
typedef struct CUctx_st *CUcontext;
typedef struct CUmod_st *CUmodule;
typedef struct CUfunc_st *CUfunction;
typedef struct CUstream_st *CUstream;
typedef struct CUevent_st *CUevent;
typedef void (*CUhostFn)(void *user);
typedef struct CUuuid {
    char bytes[16];
} CUuuid;
typedef struct CUipcMemHandle {
    char reserved[64];
} CUipcMemHandle;
typedef struct CUmemLocation {
    int type, id;
} CUmemLocation;
typedef struct CUmemAllocationProp {
    int type, requestedHandleTypes;
    CUmemLocation location;
    void *win32HandleMetaData;
    struct {
        unsigned char compressionType, gpuDirectRDMACapable;
        unsigned short usage;
        unsigned char reserved[4];
    } allocFlags;
} CUmemAllocationProp;
typedef struct CUmemAccessDesc {
    CUmemLocation location;
    int flags;
} CUmemAccessDesc;

/* ---- constants ---- */

enum {
    CUDA_SUCCESS = 0,
    CUDA_ERROR_INVALID_VALUE = 1,
    CUDA_ERROR_OUT_OF_MEMORY = 2,
    CUDA_ERROR_NOT_INITIALIZED = 3,
    CUDA_ERROR_DEINITIALIZED = 4,
    CUDA_ERROR_NO_DEVICE = 100,
    CUDA_ERROR_INVALID_DEVICE = 101,
    CUDA_ERROR_INVALID_IMAGE = 200,
    CUDA_ERROR_INVALID_CONTEXT = 201,
    CUDA_ERROR_ALREADY_MAPPED = 208,
    CUDA_ERROR_NO_BINARY_FOR_GPU = 209,
    CUDA_ERROR_PEER_ACCESS_UNSUPPORTED = 217,
    CUDA_ERROR_UNSUPPORTED_PTX_VERSION = 222,
    CUDA_ERROR_OPERATING_SYSTEM = 304,
    CUDA_ERROR_INVALID_HANDLE = 400,
    CUDA_ERROR_NOT_FOUND = 500,
    CUDA_ERROR_NOT_READY = 600,
    CUDA_ERROR_ILLEGAL_ADDRESS = 700,
    CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED = 704,
    CUDA_ERROR_CONTEXT_IS_DESTROYED = 709,
    CUDA_ERROR_TOO_MANY_PEERS = 711,
    CUDA_ERROR_LAUNCH_FAILED = 719,
    CUDA_ERROR_NOT_PERMITTED = 800,
    CUDA_ERROR_NOT_SUPPORTED = 801,
    CUDA_ERROR_SYSTEM_DRIVER_MISMATCH = 803,
    CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED = 900,
    CUDA_ERROR_STREAM_CAPTURE_INVALIDATED = 901,
    CUDA_ERROR_STREAM_CAPTURE_IMPLICIT = 906,
    CUDA_ERROR_CAPTURED_EVENT = 907,
    CUDA_ERROR_UNKNOWN = 999
};
enum {
    CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT = 16,
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75,
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76,
    CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES = 98,
    CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED = 102,
    CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED = 103,
    CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED = 110
};
enum { CU_MEMORYTYPE_HOST = 1, CU_MEMORYTYPE_DEVICE = 2, CU_MEMORYTYPE_UNIFIED = 4 };
enum {
    CU_POINTER_ATTRIBUTE_MEMORY_TYPE = 2,
    CU_POINTER_ATTRIBUTE_BUFFER_ID = 7,
    CU_POINTER_ATTRIBUTE_IS_MANAGED = 8,
    CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL = 9,
    CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE = 10,
    CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES = 14
};
enum { CU_STREAM_NON_BLOCKING = 1 };
enum { CU_STREAM_CAPTURE_STATUS_NONE = 0, CU_STREAM_CAPTURE_MODE_RELAXED = 2 };
enum { CU_STREAM_WAIT_VALUE_GEQ = 0, CU_STREAM_WAIT_VALUE_EQ = 1, CU_STREAM_WAIT_VALUE_FLUSH = 1 << 30 };
enum { CU_EVENT_DISABLE_TIMING = 2 };
enum { CU_MEMHOSTALLOC_PORTABLE = 1, CU_MEMHOSTALLOC_DEVICEMAP = 2 };
enum { CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS = 1 };
enum { CU_MEM_ALLOCATION_TYPE_PINNED = 1 };
enum { CU_MEM_LOCATION_TYPE_DEVICE = 1 };
enum { CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR = 1 };
enum { CU_MEM_ACCESS_FLAGS_PROT_READWRITE = 3 };
enum { CU_MEM_ALLOC_GRANULARITY_RECOMMENDED = 1 };

/* ---- functions ----
 * F(member of cuda_driver, name in libcuda.so.1, parameters). Each returns CUresult. */
#define CUDA_FUNCTIONS(F)                                                                                              \
    F(cuInit, cuInit, (unsigned int flags))                                                                            \
    F(cuDriverGetVersion, cuDriverGetVersion, (int *version))                                                          \
    F(cuGetErrorName, cuGetErrorName, (CUresult error, const char **text))                                             \
    F(cuDeviceGetCount, cuDeviceGetCount, (int *count))                                                                \
    F(cuDeviceGet, cuDeviceGet, (CUdevice * device, int ordinal))                                                      \
    F(cuDeviceGetName, cuDeviceGetName, (char *name, int bytes, CUdevice device))                                      \
    F(cuDeviceGetAttribute, cuDeviceGetAttribute, (int *value, int attribute, CUdevice device))                        \
    F(cuDeviceGetUuid, cuDeviceGetUuid_v2, (CUuuid * uuid, CUdevice device))                                           \
    F(cuDeviceCanAccessPeer, cuDeviceCanAccessPeer, (int *can, CUdevice device, CUdevice peer))                        \
    F(cuDevicePrimaryCtxRetain, cuDevicePrimaryCtxRetain, (CUcontext * context, CUdevice device))                      \
    F(cuDevicePrimaryCtxRelease, cuDevicePrimaryCtxRelease_v2, (CUdevice device))                                      \
    F(cuCtxPushCurrent, cuCtxPushCurrent_v2, (CUcontext context))                                                      \
    F(cuCtxPopCurrent, cuCtxPopCurrent_v2, (CUcontext * context))                                                      \
    F(cuCtxSynchronize, cuCtxSynchronize, (void))                                                                      \
    F(cuCtxGetStreamPriorityRange, cuCtxGetStreamPriorityRange, (int *least, int *greatest))                           \
    F(cuCtxEnablePeerAccess, cuCtxEnablePeerAccess, (CUcontext peer, unsigned int flags))                              \
    F(cuModuleLoadData, cuModuleLoadData, (CUmodule * module, const void *image))                                      \
    F(cuModuleUnload, cuModuleUnload, (CUmodule module))                                                               \
    F(cuModuleGetFunction, cuModuleGetFunction, (CUfunction * function, CUmodule module, const char *name))            \
    F(cuLaunchKernel, cuLaunchKernel,                                                                                  \
      (CUfunction function, unsigned int grid_x, unsigned int grid_y, unsigned int grid_z, unsigned int block_x,       \
       unsigned int block_y, unsigned int block_z, unsigned int shared_bytes, CUstream stream, void **params,          \
       void **extra))                                                                                                  \
    F(cuLaunchHostFunc, cuLaunchHostFunc, (CUstream stream, CUhostFn function, void *user))                            \
    F(cuMemAlloc, cuMemAlloc_v2, (CUdeviceptr * memory, size_t bytes))                                                 \
    F(cuMemFree, cuMemFree_v2, (CUdeviceptr memory))                                                                   \
    F(cuMemGetAddressRange, cuMemGetAddressRange_v2, (CUdeviceptr * base, size_t * bytes, CUdeviceptr pointer))        \
    F(cuMemHostAlloc, cuMemHostAlloc, (void **memory, size_t bytes, unsigned int flags))                               \
    F(cuMemFreeHost, cuMemFreeHost, (void *memory))                                                                    \
    F(cuMemHostGetDevicePointer, cuMemHostGetDevicePointer_v2,                                                         \
      (CUdeviceptr * pointer, void *memory, unsigned int flags))                                                       \
    F(cuMemcpyAsync, cuMemcpyAsync, (CUdeviceptr dst, CUdeviceptr src, size_t bytes, CUstream stream))                 \
    F(cuMemsetD8Async, cuMemsetD8Async, (CUdeviceptr dst, unsigned char value, size_t bytes, CUstream stream))         \
    F(cuPointerGetAttribute, cuPointerGetAttribute, (void *data, int attribute, CUdeviceptr pointer))                  \
    F(cuPointerGetAttributes, cuPointerGetAttributes,                                                                  \
      (unsigned int count, int *attributes, void **data, CUdeviceptr pointer))                                         \
    F(cuStreamCreateWithPriority, cuStreamCreateWithPriority, (CUstream * stream, unsigned int flags, int priority))   \
    F(cuStreamDestroy, cuStreamDestroy_v2, (CUstream stream))                                                          \
    F(cuStreamSynchronize, cuStreamSynchronize, (CUstream stream))                                                     \
    F(cuStreamWaitEvent, cuStreamWaitEvent, (CUstream stream, CUevent event, unsigned int flags))                      \
    F(cuStreamGetCtx, cuStreamGetCtx, (CUstream stream, CUcontext * context))                                          \
    F(cuStreamIsCapturing, cuStreamIsCapturing, (CUstream stream, int *status))                                        \
    F(cuThreadExchangeStreamCaptureMode, cuThreadExchangeStreamCaptureMode, (int *mode))                               \
    F(cuStreamWaitValue32, cuStreamWaitValue32_v2,                                                                     \
      (CUstream stream, CUdeviceptr word, uint32_t value, unsigned int flags))                                         \
    F(cuStreamWriteValue32, cuStreamWriteValue32_v2,                                                                   \
      (CUstream stream, CUdeviceptr word, uint32_t value, unsigned int flags))                                         \
    F(cuEventCreate, cuEventCreate, (CUevent * event, unsigned int flags))                                             \
    F(cuEventDestroy, cuEventDestroy_v2, (CUevent event))                                                              \
    F(cuEventRecord, cuEventRecord, (CUevent event, CUstream stream))                                                  \
    F(cuEventQuery, cuEventQuery, (CUevent event))                                                                     \
    F(cuIpcGetMemHandle, cuIpcGetMemHandle, (CUipcMemHandle * handle, CUdeviceptr memory))                             \
    F(cuIpcOpenMemHandle, cuIpcOpenMemHandle_v2, (CUdeviceptr * memory, CUipcMemHandle handle, unsigned int flags))    \
    F(cuIpcCloseMemHandle, cuIpcCloseMemHandle, (CUdeviceptr memory))                                                  \
    F(cuMemGetAllocationGranularity, cuMemGetAllocationGranularity,                                                    \
      (size_t * bytes, const CUmemAllocationProp *properties, int option))                                             \
    F(cuMemCreate, cuMemCreate,                                                                                        \
      (CUmemGenericAllocationHandle * handle, size_t bytes, const CUmemAllocationProp *properties,                     \
       unsigned long long flags))                                                                                      \
    F(cuMemRelease, cuMemRelease, (CUmemGenericAllocationHandle handle))                                               \
    F(cuMemAddressReserve, cuMemAddressReserve,                                                                        \
      (CUdeviceptr * address, size_t bytes, size_t alignment, CUdeviceptr wanted, unsigned long long flags))           \
    F(cuMemAddressFree, cuMemAddressFree, (CUdeviceptr address, size_t bytes))                                         \
    F(cuMemMap, cuMemMap,                                                                                              \
      (CUdeviceptr address, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,                          \
       unsigned long long flags))                                                                                      \
    F(cuMemUnmap, cuMemUnmap, (CUdeviceptr address, size_t bytes))                                                     \
    F(cuMemSetAccess, cuMemSetAccess,                                                                                  \
      (CUdeviceptr address, size_t bytes, const CUmemAccessDesc *accesses, size_t count))                              \
    F(cuMemRetainAllocationHandle, cuMemRetainAllocationHandle,                                                        \
      (CUmemGenericAllocationHandle * handle, void *address))                                                          \
    F(cuMemExportToShareableHandle, cuMemExportToShareableHandle,                                                      \
      (void *out_fd, CUmemGenericAllocationHandle handle, int type, unsigned long long flags))                         \
    F(cuMemImportFromShareableHandle, cuMemImportFromShareableHandle,                                                  \
      (CUmemGenericAllocationHandle * handle, void *fd, int type))

typedef struct cuda_driver {
#define CUDA_MEMBER(member, symbol, parameters) CUresult(*member) parameters;
    CUDA_FUNCTIONS(CUDA_MEMBER)
#undef CUDA_MEMBER
    CUresult (*cuFuncLoad)(CUfunction function); /* of CUDA 12.4; NULL: cuModuleGetFunction has loaded all of it */
} cuda_driver;

/* Finds all functions. NULL: they are there; else what is missing. The library is never closed: it has threads. */
static const char *cuda_driver_find(cuda_driver *out) {
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    void *address;
    if (library == NULL) {
        return "libcuda.so.1";
    }
#define CUDA_FIND(member, symbol, parameters)                                                                          \
    address = dlsym(library, #symbol);                                                                                 \
    if (address == NULL) {                                                                                             \
        return #symbol;                                                                                                \
    }                                                                                                                  \
    memcpy(&out->member, &address, sizeof address); /* ISO C has no cast from data to function; POSIX does */
    CUDA_FUNCTIONS(CUDA_FIND)
#undef CUDA_FIND
    address = dlsym(library, "cuFuncLoad");
    memcpy(&out->cuFuncLoad, &address, sizeof address); /* as above */
    return NULL;
}

#endif /* CUDA_DRIVER_H */
