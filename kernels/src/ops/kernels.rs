//! The kernels in CUDA C++, of all operations.

use super::{attention, decode_step, head_loss, head_sample, linear, norm};

/// The kernels in CUDA C++ by name, with all that they are compiled for in bf16: for tools that look at what compilers make of
/// them. None of them may spill registers. Of attention with dropout two masks are among them; under the other two
/// its backward pass spills up to 8 bytes in a warp that only reads. Whole decode steps of few rows are among them only for models of any shape, and one row, and not with both weights and a cache of INT8: others spill some 20 bytes a thread, and more with eight rows.
pub fn cuda_sources() -> Vec<(String, String)> {
    let sources = linear::hopper_sources().chain(attention::hopper_sources());
    let sources = sources.chain(norm::hopper_sources()).chain(head_loss::hopper_sources());
    sources.chain(decode_step::hopper_sources()).chain(head_sample::hopper_sources()).collect()
}
