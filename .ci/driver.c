/* A CUDA driver that does nothing, as of an H200: with it the CUDA build runs, and NVRTC compiles what it launches, where
 * there is no GPU. Every result is zeros. */
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

typedef unsigned long long address;

/* Those that have nothing to tell. */
#define DOES_NOTHING(name) int name(void) { return 0; }
DOES_NOTHING(cuInit)
DOES_NOTHING(cuCtxSetCurrent)
DOES_NOTHING(cuDevicePrimaryCtxRelease_v2)
DOES_NOTHING(cuEventRecord)
DOES_NOTHING(cuEventSynchronize)
DOES_NOTHING(cuEventDestroy_v2)
DOES_NOTHING(cuStreamWaitEvent)
DOES_NOTHING(cuStreamSynchronize)
DOES_NOTHING(cuFuncSetAttribute)
DOES_NOTHING(cuLaunchKernel)
DOES_NOTHING(cuLaunchKernelEx)
DOES_NOTHING(cuMemFree_v2)
DOES_NOTHING(cuMemFreeAsync)
DOES_NOTHING(cuMemcpyHtoDAsync_v2)
DOES_NOTHING(cuDriverGetVersion)
DOES_NOTHING(cuModuleUnload)
DOES_NOTHING(cuTensorMapEncodeTiled)

/* NVRTC asks for more than a driver's functions, and does without (500: not found). */
int cuGetExportTable(void) { return 500; }
int cuGetProcAddress_v2(void) { return 500; }

/* Handles need only not be null. */
static int handle(void **out) { *out = (void *)16; return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { (void)device; return handle(context); }
int cuCtxGetCurrent(void **context) { return handle(context); }
int cuStreamCreate(void **stream, unsigned flags) { (void)flags; return handle(stream); }
int cuEventCreate(void **event, unsigned flags) { (void)flags; return handle(event); }
int cuModuleLoadData(void **module, const void *image) { (void)image; return handle(module); }
int cuModuleGetFunction(void **function, void *module, const char *name) {
    (void)module, (void)name;
    return handle(function);
}

int cuDeviceGetCount(int *count) { *count = 1; return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }
int cuDeviceTotalMem_v2(size_t *bytes, int device) { (void)device; *bytes = (size_t)140 << 30; return 0; }
int cuDeviceGetName(char *name, int length, int device) {
    (void)device;
    strncpy(name, "no GPU", (size_t)length);
    return 0;
}

/* Numbers as in CUdevice_attribute. */
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    (void)device;
    switch (attribute) {
    case 1: case 2: case 3: *value = 1024; break;     /* units of a cube, and along two axes */
    case 4: *value = 64; break;                       /* along the third */
    case 5: *value = 2147483647; break;               /* cubes along an axis */
    case 6: case 7: *value = 65535; break;            /* along the others */
    case 8: *value = 49152; break;                    /* shared memory of a cube */
    case 10: *value = 32; break;                      /* units of a plane */
    case 16: *value = 132; break;                     /* multiprocessors */
    case 39: *value = 2048; break;                    /* units of one */
    case 75: *value = 9; break;                       /* compute capability 9.0 */
    case 76: *value = 0; break;
    case 97: *value = 232448; break;                  /* shared memory that a cube may ask for */
    default: *value = 1;
    }
    return 0;
}

/* Memory of the device is but addresses. */
int cuMemAlloc_v2(address *out, size_t bytes) {
    static address next = 1ULL << 40;
    *out = __atomic_fetch_add(&next, (bytes + 0xfffff) & ~0xfffffULL, __ATOMIC_RELAXED);
    return 0;
}
int cuMemAllocAsync(address *out, size_t bytes, void *stream) { (void)stream; return cuMemAlloc_v2(out, bytes); }
int cuMemAllocHost_v2(void **out, size_t bytes) {
    *out = aligned_alloc(4096, (bytes + 4095) & ~(size_t)4095);
    return *out ? 0 : 2;
}
int cuMemFreeHost(void *memory) { free(memory); return 0; }

int cuMemcpyDtoHAsync_v2(void *to, address from, size_t bytes, void *stream) {
    (void)from, (void)stream;
    memset(to, 0, bytes);
    return 0;
}

/* CUDA_MEMCPY2D: rows to host memory (memory type 1) become zeros. */
struct copy {
    size_t from_x, from_y; int from_type; const void *from_host; address from_device; void *from_array; size_t from_pitch;
    size_t to_x, to_y; int to_type; char *to_host; address to_device; void *to_array; size_t to_pitch;
    size_t width, height;
};
int cuMemcpy2DAsync_v2(const struct copy *copy, void *stream) {
    (void)stream;
    for (size_t row = 0; copy->to_type == 1 && row < copy->height; row++) {
        memset(copy->to_host + row * copy->to_pitch, 0, copy->width);
    }
    return 0;
}
