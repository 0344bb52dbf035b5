//! Attention for Ampere and later in CUDA C++ (`sm80/`).

use std::sync::Mutex;

use burn::tensor::DType;
use burn_cubecl::CubeRuntime;
use burn_cubecl::tensor::CubeTensor;

use super::{Fused, Mask, Pass};
use crate::cubecl::empty;
use crate::cuda::{self, AMPERE, Arguments, CudaKernel, Tried, shared_bytes};
use crate::multiprocessors::multiprocessors;
use crate::ops::attention::cubecl::Heads;
use crate::ops::dropout::Dropout;

/// Queries of a block of the forward pass, of four warps.
const FORWARD_QUERIES: usize = 128;

/// What the kernel is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct AttentionAmpere {
    pass: Pass,
    /// Its dtype in the source.
    half: &'static str,
    head_dim: usize,
    mask: Mask,
    dropout: bool,
    /// Keys of a tile; backward queries of one, and stages of these.
    keys: usize,
    queries: usize,
    stages: usize,
}

impl AttentionAmpere {
    /// The kernel with the largest tiles that so many bytes of shared memory have room for.
    fn new(
        pass: Pass,
        half: &'static str,
        head_dim: usize,
        mask: Mask,
        dropout: bool,
        most_bytes: usize,
    ) -> Option<Self> {
        // Scores of 32 queries and the output are in a warp's registers, and with dropout random
        // bits.
        let tiles: &[[usize; 3]] = match (pass, head_dim) {
            (Pass::Forward, 64) if !dropout => &[[128, FORWARD_QUERIES, 1]],
            (Pass::Forward, _) => &[[64, FORWARD_QUERIES, 1]],
            (Pass::Backward, 64) => &[[128, 128, 2], [128, 64, 1]],
            (Pass::Backward, _) => &[[128, 64, 2], [64, 64, 1]],
            (Pass::Paged, _) => &[],
        };
        let kernel =
            |[keys, queries, stages]: [usize; 3]| Self { pass, half, head_dim, mask, dropout, keys, queries, stages };
        tiles.iter().copied().map(kernel).find(|kernel| kernel.shared_bytes() <= most_bytes)
    }
}

impl CudaKernel for AttentionAmpere {
    fn threads(&self) -> u32 {
        if self.pass == Pass::Backward { 256 } else { 128 }
    }

    fn entry(&self) -> &'static str {
        if self.pass == Pass::Backward { "attention_backward_ampere" } else { "attention_forward_ampere" }
    }

    fn source(&self) -> String {
        let Self { pass, half, head_dim, mask, dropout, keys, queries, stages } = *self;
        let defined = cuda::defines([
            ("HEAD_DIM", head_dim),
            ("MASK", mask as usize),
            ("DROPOUT", dropout.into()),
            ("KEYS", keys),
        ]);
        let of_backward = cuda::defines([("QUERIES", queries), ("STAGES", stages)]);
        let (of_pass, source) = match pass {
            Pass::Backward => (of_backward.as_str(), include_str!("sm80/backward.cu")),
            Pass::Forward | Pass::Paged => ("", include_str!("sm80/forward.cu")),
        };
        let shared = concat!(include_str!("masks.cuh"), include_str!("sm80/attention.cuh"));
        format!("#define HALF \"{half}\"\n{defined}{of_pass}{AMPERE}{shared}{source}")
    }

    /// Forward: queries, a block of keys and one of values. Backward: keys and values, stages of
    /// queries, gradients and what is known of each query, two tiles of scores, and two numbers.
    fn shared_bytes(&self) -> usize {
        let row = self.head_dim * 2;
        match self.pass {
            Pass::Forward | Pass::Paged => (self.queries + 2 * self.keys) * row,
            Pass::Backward => {
                let stage = self.queries * (2 * row + 8);
                2 * self.keys * row + self.stages * stage + 2 * self.keys * self.queries * 2 + 8
            }
        }
    }

    fn tried() -> &'static Tried<Self> {
        static TRIED: Tried<AttentionAmpere> = Mutex::new(None);
        &TRIED
    }
}

/// The kernels in bf16, for devices with this shared memory per block: those of a causal mask, and
/// the others if `all` are asked for.
pub(super) fn kernels(most_bytes: usize, all: bool) -> impl Iterator<Item = AttentionAmpere> {
    let kinds = [(Mask::UpToOwn, false), (Mask::Every, false), (Mask::Documents, false), (Mask::UpToOwn, true)];
    let passes = [(Pass::Forward, 64), (Pass::Forward, 128), (Pass::Backward, 64), (Pass::Backward, 128)];
    kinds.into_iter().take(if all { kinds.len() } else { 1 }).flat_map(move |(mask, dropout)| {
        let kernel = move |(pass, head_dim)| AttentionAmpere::new(pass, "bf16", head_dim, mask, dropout, most_bytes);
        passes.into_iter().filter_map(kernel)
    })
}

impl<R: CubeRuntime> Fused<R> {
    /// The kernel of a pass; none if no tile has room on the device of `x`.
    pub(super) fn ampere_kernel(&self, x: &CubeTensor<R>, pass: Pass) -> Option<AttentionAmpere> {
        let dropout = self.options.dropout.is_some();
        AttentionAmpere::new(pass, self.half, self.dims.head_dim, self.mask, dropout, shared_bytes(x))
    }

    pub(super) fn launch_ampere_forward(&self, heads: [&Heads<R>; 4], log_sum_exp: &CubeTensor<R>) {
        let tiles = self.dims.seq_length.div_ceil(FORWARD_QUERIES);
        let blocks = tiles * self.dims.n_heads * self.dims.batch_size;
        self.launch_ampere(Pass::Forward, &heads, &[log_sum_exp], blocks);
    }

    pub(super) fn launch_ampere_backward(&self, heads: [&Heads<R>; 7], statistics: &CubeTensor<R>) {
        let x = &heads[0].tensor;
        let Some(kernel) = self.ampere_kernel(x, Pass::Backward) else { return };
        let tiles = self.dims.batch_size * self.dims.n_heads * self.dims.seq_length.div_ceil(kernel.queries);
        let sums = empty(x, [tiles, kernel.queries, self.dims.head_dim], DType::F32);
        let marks = cuda::marks(x, 1 + tiles);
        self.launch_ampere(Pass::Backward, &heads, &[statistics, &sums, &marks], multiprocessors(x) as usize);
    }

    fn launch_ampere(&self, pass: Pass, heads: &[&Heads<R>], others: &[&CubeTensor<R>], blocks: usize) {
        let x = &heads[0].tensor;
        let Some(kernel) = self.ampere_kernel(x, pass) else { return };
        let pointers =
            heads.iter().fold(Arguments::default(), |all, heads| all.pointer_from(&heads.tensor, heads.offset));
        let pointers = others.iter().fold(pointers, |all, other| all.pointer(other));
        // Never read without such a mask.
        let arguments = pointers.pointer(self.ints.as_ref().unwrap_or(x));
        let arguments =
            self.sizes().into_iter().fold(arguments, Arguments::word).words(Dropout::words(self.options.dropout));
        let arguments = heads.iter().flat_map(|heads| heads.strides).fold(arguments, Arguments::word);
        // SAFETY: heads are read and written in pieces of 16 bytes, which `Fused::new` found to be
        // aligned, below the numbers of batches, heads and rows; what is known of rows below the
        // number of queries; each row of the batch has a length, and each tile of tokens its
        // documents' data. Each tile of queries of all heads has sums and a mark; a tile's are
        // written by one block at a time, whose turn the marks tell, which are 0 before and after.
        unsafe { cuda::launch(x, kernel, blocks as u32, arguments) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_pass_has_tiles_that_fit_into_shared_memory() {
        for most in [99 << 10, 163 << 10, 227 << 10] {
            for pass in [Pass::Forward, Pass::Backward] {
                for head_dim in [64, 128] {
                    let kernel = AttentionAmpere::new(pass, "bf16", head_dim, Mask::Every, false, most);
                    assert!(
                        kernel.is_some_and(|kernel| kernel.shared_bytes() <= most),
                        "{pass:?} of {head_dim} in {most}"
                    );
                }
            }
        }
    }
}
