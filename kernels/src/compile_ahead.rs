//! Kernels compiled before they are launched.

use burn::tensor::backend::Backend;

/// Compiles the kernels of `work` by all cores at once, where they would be compiled one after the other as they are launched, and the device's
/// compiler keeps them: those in CUDA C++, on Hopper. For that `work` is called once, without these launches, so that what it computes means
/// nothing, and must not be kept, or read and acted upon; what it launches it launches on this thread. Operations that write
/// into what the caller keeps, [`cached_attention`](crate::cached_attention()), [`decode_step`](crate::decode_step()) and draws
/// that are counted, panic in it. Elsewhere nothing is done, and `work` is not called: on other devices,
/// with one core, inside another such call, and where nothing compiled is kept (before CUDA 12.9, or with `CUDA_CACHE_DISABLE=1`).
pub fn compile_ahead<B: Backend>(device: &B::Device, work: impl FnOnce()) {
    #[cfg(feature = "cuda")]
    if !crate::selection::reference_only() {
        crate::cuda::compile_ahead(device, work);
    }
    #[cfg(not(feature = "cuda"))]
    let _ = (device, work);
}
