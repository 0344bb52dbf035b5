//! How many multiprocessors a kernel may count on.

use burn_cubecl::CubeRuntime;
use burn_cubecl::tensor::CubeTensor;

/// How many multiprocessors the device of a tensor has, or might have where it does not say, as Vulkan.
pub(crate) fn multiprocessors<R: CubeRuntime>(x: &CubeTensor<R>) -> u32 {
    let own = x.client.properties().hardware.num_streaming_multiprocessors.unwrap_or(64);
    #[cfg(feature = "cuda")]
    if let Some(arch) = crate::cuda::arch::in_place_of_own(x) {
        return own.min(arch.multiprocessors());
    }
    own
}
