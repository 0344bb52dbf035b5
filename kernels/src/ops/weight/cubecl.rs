//! Bytes in CubeCL: spread into floats, or looked up by token.

use burn::tensor::backend::Backend;
use burn::tensor::{DType, Tensor};
use burn_cubecl::element::BoolElement;
use burn_cubecl::tensor::CubeTensor;
use burn_cubecl::{CubeBackend, CubeRuntime, FloatElement, IntElement};
use cubecl::prelude::*;

use super::{Int8ToFloat, Int8Weight, PACKED, WeightOps};
use crate::checked::Checked;
use crate::cubecl::{array, clamp_index, contiguous, empty, grid};
use crate::tensor::{float, primitive};

const UNITS: u32 = 256;

type Four<O> = Vector<O, Const<4>>;

/// [`Int8Weight`](super::Int8Weight) on the device.
#[derive(Clone, Debug)]
pub(crate) struct CubeInt8<R: CubeRuntime> {
    /// `[d_output, d_input / 4]`.
    pub(crate) packed: CubeTensor<R>,
    pub(crate) scales: CubeTensor<R>,
}

/// Bytes and scales as primitives.
pub(crate) fn cube_int8<R, B>(weight: Int8Weight<B>) -> CubeInt8<R>
where
    R: CubeRuntime,
    B: Backend<FloatTensorPrimitive = CubeTensor<R>, IntTensorPrimitive = CubeTensor<R>>,
{
    CubeInt8 { packed: weight.packed.into_primitive(), scales: primitive(weight.scales) }
}

impl<R, F, I, BT> WeightOps for CubeBackend<R, F, I, BT>
where
    R: CubeRuntime,
    F: FloatElement,
    I: IntElement,
    BT: BoolElement,
{
    fn int8_to_float(operands: Checked<Int8ToFloat<Self>>) -> Tensor<Self, 2> {
        let Int8ToFloat { weight, dtype } = operands.into_inner();
        let weight = cube_int8(weight);
        let [rows, words] = [weight.packed.meta.shape()[0], weight.packed.meta.shape()[1]];
        let out = empty(&weight.packed, [rows, words * PACKED], dtype.into());
        spread(weight, None, &out, rows, words);
        float(out)
    }
}

/// The rows that `tokens` `[batch_size, seq_length]` name, `[batch_size, seq_length, d_input]` of `dtype`.
pub(crate) fn int8_embed<R: CubeRuntime>(weight: CubeInt8<R>, tokens: CubeTensor<R>, dtype: DType) -> CubeTensor<R> {
    let [batch_size, seq_length] = [tokens.meta.shape()[0], tokens.meta.shape()[1]];
    let words = weight.packed.meta.shape()[1];
    let out = empty(&weight.packed, [batch_size, seq_length, words * PACKED], dtype);
    spread(weight, Some(contiguous(tokens)), &out, batch_size * seq_length, words);
    out
}

fn spread<R: CubeRuntime>(
    weight: CubeInt8<R>,
    tokens: Option<CubeTensor<R>>,
    out: &CubeTensor<R>,
    rows: usize,
    words: usize,
) {
    let (packed, scales) = (contiguous(weight.packed), contiguous(weight.scales));
    let named = tokens.is_some();
    let tokens = tokens.unwrap_or_else(|| packed.clone());
    let units = rows * words;
    // SAFETY: each unit below `units` writes its own four elements, and reads one word of a row within the weight.
    unsafe {
        spread_kernel::launch_unchecked(
            &out.client,
            grid(units.div_ceil(UNITS as usize)),
            CubeDim::new_1d(UNITS),
            array(&packed),
            array(&scales),
            array(&tokens),
            array(out),
            units as u32,
            words as u32,
            packed.meta.shape()[0] as u32 - 1,
            named,
            tokens.dtype.into(),
            out.dtype.into(),
        );
    }
}

#[cube(launch_unchecked)]
fn spread_kernel<I: Int, O: Float>(
    packed: &Array<u32>,
    scales: &Array<f32>,
    tokens: &Array<I>,
    out: &mut Array<Four<O>>,
    units: u32,
    words: u32,
    last: u32,
    #[comptime] named: bool,
    #[define(I)] _token_dtype: StorageType,
    #[define(O)] _dtype: StorageType,
) {
    let at = ABSOLUTE_POS as u32;
    if at >= units {
        terminate!();
    }
    let mut row = at / words;
    if named {
        row = clamp_index::<I>(tokens[row as usize], last);
    }
    let word = packed[(row * words + at % words) as usize];
    out[at as usize] = Four::<O>::cast_from(bytes(word) * Four::<f32>::new(scales[row as usize]));
}

/// The four signed bytes of a word.
#[cube]
pub(crate) fn bytes(word: u32) -> Vector<f32, Const<4>> {
    let mut four = Vector::<f32, Const<4>>::new(0.0);
    #[unroll]
    for i in 0..4usize {
        // With its sign bit flipped, a byte counts up from the least one.
        let byte = ((word >> comptime!(8 * i as u32)) & 0xff) ^ 0x80;
        four[i] = f32::cast_from(byte) - 128.0f32;
    }
    four
}
