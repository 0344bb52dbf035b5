//! Quantized rows in CubeCL: dequantizes all rows, or those of given tokens.

use burn::tensor::backend::Backend;
use burn::tensor::{DType, Tensor};
use burn_cubecl::element::BoolElement;
use burn_cubecl::tensor::CubeTensor;
use burn_cubecl::{CubeBackend, CubeRuntime, FloatElement, IntElement};
use cubecl::prelude::*;

use super::{Dequantize, WeightOps, reference};
use crate::checked::Checked;
use crate::cubecl::{array, clamp_index, contiguous, empty, grid};
use crate::quant::blocks::cubecl::weight;
use crate::quant::grouped::cubecl::weight as grouped_weight;
use crate::quant::halves::f16_of;
use crate::quant::{Format, QuantizedWeight, Reader, int8};
use crate::tensor::{float, primitive};

const UNITS: u32 = 256;

type Four<O> = Vector<O, Const<4>>;

/// [`QuantizedWeight`] on the device.
#[derive(Clone, Debug)]
pub(crate) struct CubeQuantized<R: CubeRuntime> {
    /// `[d_output, words of a row]`.
    pub(crate) packed: CubeTensor<R>,
    /// `[d_output * scales of a row]`, where they are kept apart.
    pub(crate) scales: Option<CubeTensor<R>>,
    pub(crate) format: Format,
    pub(crate) dims: [usize; 2],
}

/// Words and scales as primitives.
pub(crate) fn cube_quantized<R, B>(weight: QuantizedWeight<B>) -> CubeQuantized<R>
where
    R: CubeRuntime,
    B: Backend<FloatTensorPrimitive = CubeTensor<R>, IntTensorPrimitive = CubeTensor<R>>,
{
    let (dims, format) = (weight.dims(), weight.format);
    CubeQuantized { packed: weight.packed.into_primitive(), scales: weight.scales.map(primitive), format, dims }
}

impl<R, F, I, BT> WeightOps for CubeBackend<R, F, I, BT>
where
    R: CubeRuntime,
    F: FloatElement,
    I: IntElement,
    BT: BoolElement,
{
    fn dequantize(operands: Checked<Dequantize<Self>>) -> Tensor<Self, 2> {
        let operands = operands.into_inner();
        if !operands.weight.format.is_read_by(Reader::Rows) {
            return reference::dequantize(operands);
        }
        let weight = cube_quantized(operands.weight);
        let out = empty(&weight.packed, weight.dims, operands.dtype.into());
        let rows = weight.dims[0];
        dequantize_rows(weight, None, &out, rows);
        float(out)
    }
}

/// The rows at `tokens` `[batch_size, seq_length]`, as `[batch_size, seq_length, d_input]` of
/// `dtype`, for formats supported by [`Reader::Rows`].
pub(crate) fn quantized_embed<R: CubeRuntime>(
    weight: CubeQuantized<R>,
    tokens: CubeTensor<R>,
    dtype: DType,
) -> CubeTensor<R> {
    let [batch_size, seq_length] = [tokens.meta.shape()[0], tokens.meta.shape()[1]];
    let out = empty(&weight.packed, [batch_size, seq_length, weight.dims[1]], dtype);
    dequantize_rows(weight, Some(contiguous(tokens)), &out, batch_size * seq_length);
    out
}

fn dequantize_rows<R: CubeRuntime>(
    weight: CubeQuantized<R>,
    tokens: Option<CubeTensor<R>>,
    out: &CubeTensor<R>,
    rows: usize,
) {
    let words = weight.packed.meta.shape()[1];
    let packed = contiguous(weight.packed);
    let numbers_each = weight.format.layout(weight.dims[1]).map_or(0, |layout| layout.scales);
    // A kernel takes an array in place of each that is not there.
    let scales = weight.scales.map_or_else(|| packed.clone(), contiguous);
    let named = tokens.is_some();
    let tokens = tokens.unwrap_or_else(|| packed.clone());
    let fours = weight.dims[1] / 4;
    let units = rows * fours;
    // SAFETY: each unit below `units` writes its own four elements, and reads words of one row within the weight.
    unsafe {
        dequantize_kernel::launch_unchecked(
            &out.client,
            grid(units.div_ceil(UNITS as usize)),
            CubeDim::new_1d(UNITS),
            array(&packed),
            array(&scales),
            array(&tokens),
            array(out),
            units as u32,
            fours as u32,
            words as u32,
            numbers_each as u32,
            packed.meta.shape()[0] as u32 - 1,
            named,
            weight.format,
            tokens.dtype.into(),
            out.dtype.into(),
        );
    }
}

#[cube(launch_unchecked)]
fn dequantize_kernel<I: Int, O: Float>(
    packed: &Array<u32>,
    scales: &Array<f32>,
    tokens: &Array<I>,
    out: &mut Array<Four<O>>,
    units: u32,
    fours: u32,
    words: u32,
    numbers_each: u32,
    last: u32,
    #[comptime] named: bool,
    #[comptime] format: Format,
    #[define(I)] _token_dtype: StorageType,
    #[define(O)] _dtype: StorageType,
) {
    let at = ABSOLUTE_POS as u32;
    if at >= units {
        terminate!();
    }
    let mut row = at / fours;
    if named {
        row = clamp_index::<I>(tokens[row as usize], last);
    }
    let weights = four_weights(packed, scales, row, at % fours, words, numbers_each, format);
    out[at as usize] = Four::<O>::cast_from(weights);
}

/// Weights `4 * four` to `4 * four + 3` of row `row`.
#[cube]
pub(crate) fn four_weights(
    packed: &Array<u32>,
    scales: &Array<f32>,
    row: u32,
    four: u32,
    words: u32,
    numbers_each: u32,
    #[comptime] format: Format,
) -> Vector<f32, Const<4>> {
    let begin = row * words;
    let mut weights = Vector::<f32, Const<4>>::new(0.0);
    match format {
        Format::Int8 => {
            let scale = scales[row as usize];
            weights = int8::unpack(packed[(begin + four) as usize]) * Vector::<f32, Const<4>>::new(scale);
        }
        Format::F16 =>
        {
            #[unroll]
            for i in 0..4usize {
                let word = packed[(begin + 2 * four + comptime!(i as u32 / 2)) as usize];
                weights[i] = f16_of((word >> comptime!(i as u32 % 2 * 16)) & 0xffff);
            }
        }
        Format::Bf16 =>
        {
            #[unroll]
            for i in 0..4usize {
                let word = packed[(begin + 2 * four + comptime!(i as u32 / 2)) as usize];
                weights[i] = f32::reinterpret((word >> comptime!(i as u32 % 2 * 16)) << 16);
            }
        }
        Format::Blocks(blocks) =>
        {
            #[unroll]
            for i in 0..4usize {
                weights[i] = weight(packed, 4 * begin, 4 * four + comptime!(i as u32), blocks);
            }
        }
        Format::Grouped(grouped) => {
            let numbers = row * numbers_each;
            #[unroll]
            for i in 0..4usize {
                weights[i] = grouped_weight(packed, scales, begin, numbers, 4 * four + comptime!(i as u32), grouped);
            }
        }
    }
    weights
}
