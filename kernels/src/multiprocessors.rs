//! Number of multiprocessors.

use burn_cubecl::CubeRuntime;
use burn_cubecl::tensor::CubeTensor;

/// The multiprocessors of a tensor's device, or an assumption if it does not report them, as with
/// Vulkan.
pub(crate) fn multiprocessors<R: CubeRuntime>(x: &CubeTensor<R>) -> u32 {
    x.client.properties().hardware.num_streaming_multiprocessors.unwrap_or(64)
}
