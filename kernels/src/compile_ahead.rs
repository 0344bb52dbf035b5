//! Compilation of kernels before their first launch.

use burn::tensor::backend::Backend;

/// Compiles the kernels of `work` on all cores at once, instead of one by one at their first
/// launches: CUDA C++ kernels on Hopper, if the device's compiler caches them. For that it calls
/// `work` once without these launches: the results are garbage and must not be kept, read or acted
/// upon; other kernels are launched on this thread. Operations that write into the caller's state,
/// [`cached_attention`](crate::cached_attention()), [`decode_step`](crate::decode_step()) and
/// counted draws, panic in it. Does nothing, and does not call `work`, on other devices, with one
/// core, inside another such call, and where nothing compiled is cached (before CUDA 12.9, or with
/// `CUDA_CACHE_DISABLE=1`).
pub fn compile_ahead<B: Backend>(device: &B::Device, work: impl FnOnce()) {
    #[cfg(feature = "cuda")]
    if !crate::selection::reference_only() {
        crate::cuda::compile_ahead(device, work);
    }
    #[cfg(not(feature = "cuda"))]
    let _ = (device, work);
}
