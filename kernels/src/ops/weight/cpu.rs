//! Quantized weights on the CPU: put in the order in which kernels read them, and dequantized.

use burn::tensor::Tensor;
use burn::tensor::backend::ExecutionError;
use burn_ndarray::NdArray;
use rayon::prelude::*;

use super::{Dequantize, HostWeight, WeightOps};
use crate::checked::Checked;
use crate::cpu::{QuantizedRows, new_rows, tensor, words_tensor};
use crate::quant::tiles::{self, TILE};
use crate::quant::{QuantizedWeight, RowOrder};

impl WeightOps for NdArray {
    /// In tiles where there is a kernel that reads them, in the memory that the words have already.
    fn store(weight: Checked<HostWeight<Self>>) -> Result<QuantizedWeight<Self>, ExecutionError> {
        let HostWeight { format, shape: [d_output, _], mut words, scales, .. } = weight.into_inner();
        let words_each = words.len() / d_output;
        let order = match format.tiles() {
            None => RowOrder::Rows,
            Some(fields) => {
                let tiles = words[..d_output / TILE * TILE * words_each].par_chunks_exact_mut(TILE * words_each);
                tiles.for_each_init(Vec::new, |scratch, tile| tiles::tile_rows(fields, tile, scratch));
                RowOrder::Tiles
            }
        };
        let packed = words_tensor(words, [d_output, words_each]);
        let scales = (!scales.is_empty()).then(|| {
            let size = scales.len();
            tensor(scales, [size])
        });
        Ok(QuantizedWeight { packed, scales, format, order })
    }

    fn dequantize(operands: Checked<Dequantize<Self>>) -> Tensor<Self, 2> {
        let weight = operands.into_inner().weight;
        let [d_output, d_input] = weight.dims();
        let rows = QuantizedRows::of(weight);
        let [out] = new_rows(
            d_output,
            [d_input],
            #[inline(always)]
            |first, [out]| rows.dequantize(first..first + out.len() / d_input, out),
        );
        tensor(out, [d_output, d_input])
    }
}
