//! Per-tile data of attention over documents, computed on the device from the document starts.

use std::sync::Mutex;

use burn::tensor::DType;
use burn_cubecl::CubeRuntime;
use burn_cubecl::tensor::CubeTensor;

use super::{MOST_WINDOW, Mask, ROWS};
use crate::cubecl::empty;
use crate::cuda::{self, Arguments, COMMON, CudaKernel, Tried};

/// Integers per tile: one per token, and four.
const TILE: usize = ROWS + 4;

/// Its kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Documents;

impl CudaKernel for Documents {
    fn threads(&self) -> u32 {
        1024
    }

    fn entry(&self) -> &'static str {
        "attention_documents"
    }

    fn source(&self) -> String {
        let defined = cuda::defines([("MASK", Mask::Documents as usize), ("DROPOUT", 0)]);
        let half = "#define HALF \"bf16\"\n";
        format!("{half}{defined}{COMMON}{}{}", include_str!("masks.cuh"), include_str!("documents.cu"))
    }

    fn shared_bytes(&self) -> usize {
        0
    }

    fn tried() -> &'static Tried<Self> {
        static TRIED: Tried<Documents> = Mutex::new(None);
        &TRIED
    }
}

impl Documents {
    /// Whether the kernel runs on the device of `starts`; tried on a row of one tile.
    pub(super) fn works<R: CubeRuntime>(starts: &CubeTensor<R>) -> bool {
        cuda::works(starts, &Self, super::INSTEAD, || {
            Self::rows(&empty(starts, [1, ROWS], DType::I32), None);
        })
    }

    /// From contiguous 32-bit starts `[batch_size, seq_length]`: the data of each tile of 64
    /// tokens, `[batch_size, tiles, TILE]`.
    pub(super) fn rows<R: CubeRuntime>(starts: &CubeTensor<R>, window: Option<usize>) -> CubeTensor<R> {
        let [batch_size, seq_length] = starts.meta.shape().dims();
        let fits = starts.dtype == DType::I32 && starts.is_contiguous();
        assert!(fits, "attention: starts of documents are 32 bits, one behind the other");
        let rows = empty(starts, [batch_size, seq_length.div_ceil(ROWS), TILE], DType::I32);
        let window = window.unwrap_or(MOST_WINDOW).min(MOST_WINDOW);
        let arguments = Arguments::default().pointer(starts).pointer(&rows).word(seq_length).word(window);
        // SAFETY: a block reads the starts of a row and writes the data of its tiles, whatever the
        // starts are.
        unsafe { cuda::launch(starts, Self, batch_size as u32, arguments) };
        rows
    }
}
