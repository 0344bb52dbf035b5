//! Rotation in CubeCL: of separate or packed heads, in place if possible.

use burn::tensor::backend::Backend;
use burn::tensor::{self, Tensor};
use burn_cubecl::element::BoolElement;
use burn_cubecl::tensor::CubeTensor;
use burn_cubecl::{CubeBackend, CubeRuntime, FloatElement, IntElement};
use cubecl::prelude::*;

use super::{NextPositions, QkvRotaryForward, RotaryForward, RotaryOps, RotaryTable};
use crate::checked::Checked;
use crate::cubecl::{array, clamp_index, contiguous, empty, grid, launch, rows, vector_width};
use crate::packed_heads::PackedHeads;
use crate::tensor::{float, primitive};

const UNITS: u32 = 256;

/// Maximum heads per unit, which share loads of cosines and sines.
const MAX_HEADS: usize = 4;

/// A table's cosines and sines, positions, and the direction.
struct Turn<R: CubeRuntime> {
    cos: CubeTensor<R>,
    sin: CubeTensor<R>,
    positions: CubeTensor<R>,
    inverse: bool,
}

impl<R: CubeRuntime> Turn<R> {
    fn new<B>(table: RotaryTable<B>, positions: Tensor<B, 2, tensor::Int>, inverse: bool) -> Self
    where
        B: Backend<FloatTensorPrimitive = CubeTensor<R>, IntTensorPrimitive = CubeTensor<R>>,
    {
        let (cos, sin) = (primitive(table.cos), primitive(table.sin));
        Self { cos, sin, positions: positions.into_primitive(), inverse }
    }
}

impl<R, F, I, BT> RotaryOps for CubeBackend<R, F, I, BT>
where
    R: CubeRuntime,
    F: FloatElement,
    I: IntElement,
    BT: BoolElement,
{
    fn rotary_forward(operands: Checked<RotaryForward<Self>>) -> Tensor<Self, 4> {
        let RotaryForward { x, table, positions, inverse } = operands.into_inner();
        float(rotary(primitive(x), Turn::new(table, positions, inverse)))
    }

    fn qkv_rotary_forward(operands: Checked<QkvRotaryForward<Self>>) -> Tensor<Self, 3> {
        let QkvRotaryForward { qkv, heads, table, positions, inverse } = operands.into_inner();
        float(qkv_rotary(primitive(qkv), heads, Turn::new(table, positions, inverse)))
    }

    fn next_positions(operands: Checked<NextPositions<Self>>) -> Tensor<Self, 2, tensor::Int> {
        let NextPositions { positions, last } = operands.into_inner();
        Tensor::from_primitive(next_positions(positions.into_primitive(), last))
    }
}

/// Strides, in elements on the host and in vectors on the device.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
struct Strides {
    batch: u32,
    head: u32,
    token: u32,
}

/// Rotates `[batch_size, heads, seq_length, head_dim]`, in either order of tokens and heads; the
/// result has the layout of the input.
fn rotary<R: CubeRuntime>(x: CubeTensor<R>, turn: Turn<R>) -> CubeTensor<R> {
    let x = if x.meta.shape()[3] == 1 || x.meta.strides()[3] == 1 { x } else { contiguous(x) };
    let [batch_size, heads, seq_length, head_dim] = dims(&x);
    let strides = [x.meta.strides()[0], x.meta.strides()[1], x.meta.strides()[2]];
    let out = if strides[1] < strides[2] {
        let mut out = empty(&x, [batch_size, seq_length, heads, head_dim], x.dtype);
        out.meta.swap(1, 2);
        out
    } else {
        empty(&x, [batch_size, heads, seq_length, head_dim], x.dtype)
    };
    let out_strides = [out.meta.strides()[0], out.meta.strides()[1], out.meta.strides()[2]];
    let sizes = [batch_size, seq_length, heads, head_dim];
    launch(&x, &out, array(&out), sizes, heads, strides, out_strides, turn);
    out
}

/// Rotates the query and key heads of `[batch_size, seq_length, width]`; value heads stay
/// unchanged.
fn qkv_rotary<R: CubeRuntime>(qkv: CubeTensor<R>, heads: PackedHeads, turn: Turn<R>) -> CubeTensor<R> {
    let qkv = if qkv.meta.strides()[2] == 1 { qkv } else { contiguous(qkv) };
    let [batch_size, seq_length, width] = dims(&qkv);
    let strides = [qkv.meta.strides()[0], heads.head_dim, qkv.meta.strides()[1]];
    let rotated = heads.n_heads + heads.n_kv_heads;
    if qkv.can_mut() && qkv.is_nonoverlapping() {
        let sizes = [batch_size, seq_length, rotated, heads.head_dim];
        let out = ArrayArg::Alias { input_pos: 0, length: [qkv.meta.num_elements()] };
        launch(&qkv, &qkv, out, sizes, rotated, strides, strides, turn);
        return qkv;
    }
    let out = empty(&qkv, [batch_size, seq_length, width], qkv.dtype);
    let out_strides = [seq_length * width, heads.head_dim, width];
    let sizes = [batch_size, seq_length, rotated + heads.n_kv_heads, heads.head_dim];
    launch(&qkv, &out, array(&out), sizes, rotated, strides, out_strides, turn);
    out
}

/// Each of `positions` plus one, up to `last`.
fn next_positions<R: CubeRuntime>(positions: CubeTensor<R>, last: usize) -> CubeTensor<R> {
    let positions = contiguous(positions);
    let out = empty(&positions, positions.meta.shape().clone(), positions.dtype);
    let size = positions.meta.num_elements();
    // SAFETY: each unit below `size` reads and writes its own element.
    unsafe {
        next_positions_kernel::launch_unchecked(
            &out.client,
            grid(size.div_ceil(UNITS as usize)),
            CubeDim::new_1d(UNITS),
            array(&positions),
            array(&out),
            size as u32,
            last as i32,
            out.dtype.into(),
        );
    }
    out
}

#[cube(launch_unchecked)]
fn next_positions_kernel<I: Int>(
    positions: &Array<I>,
    out: &mut Array<I>,
    size: u32,
    last: i32,
    #[define(I)] _dtype: StorageType,
) {
    if (ABSOLUTE_POS as u32) < size {
        out[ABSOLUTE_POS] = I::cast_from(min(i32::cast_from(positions[ABSOLUTE_POS]) + 1, last));
    }
}

fn dims<R: CubeRuntime, const D: usize>(x: &CubeTensor<R>) -> [usize; D] {
    std::array::from_fn(|axis| x.meta.shape()[axis])
}

/// Rotates the first `rotated` of a token's heads and copies the others. Strides are of batch, head
/// and token.
fn launch<R: CubeRuntime>(
    x: &CubeTensor<R>,
    out: &CubeTensor<R>,
    out_array: ArrayArg<R>,
    [batch_size, seq_length, heads, head_dim]: [usize; 4],
    rotated: usize,
    strides: [usize; 3],
    out_strides: [usize; 3],
    turn: Turn<R>,
) {
    let (half, pairs) = (turn.cos.meta.shape()[1], head_dim / 2);
    let (cos, cos_stride) = rows(turn.cos);
    let (sin, sin_stride) = rows(turn.sin);
    let positions = turn.positions;
    let [batch_step, token_step] = [positions.meta.strides()[0], positions.meta.strides()[1]];
    let mut lengths = vec![half, pairs, cos_stride, sin_stride];
    lengths.extend(strides.iter().chain(&out_strides));
    let vector = vector_width(&[x, out, &cos, &sin], &lengths);
    let at_once = (1..=MAX_HEADS).rev().find(|at_once| heads.is_multiple_of(*at_once)).unwrap_or(1);
    let units = batch_size * seq_length * (heads / at_once) * (pairs / vector);
    let steps = |strides: [usize; 3]| {
        let [batch, head, token] = strides.map(|stride| (stride / vector) as u32);
        StridesLaunch::new(batch, head, token)
    };
    // SAFETY: each unit below `units` reads and writes pairs of its own within the strides, and
    // positions are held within the table.
    unsafe {
        launch!(
            rotary_kernel::RotaryKernel,
            &x.client,
            grid(units.div_ceil(UNITS as usize)),
            CubeDim::new_1d(UNITS),
            [N = vector],
            [F = x.dtype, T = cos.dtype, I = positions.dtype],
            [
                x: Array<Vector<rotary_kernel::F, rotary_kernel::N>> = array(x),
                cos: Array<Vector<rotary_kernel::T, rotary_kernel::N>> = array(&cos),
                sin: Array<Vector<rotary_kernel::T, rotary_kernel::N>> = array(&sin),
                positions: Array<rotary_kernel::I> = array(&positions),
                out: Array<Vector<rotary_kernel::F, rotary_kernel::N>> = out_array,
                units: u32 = units as u32,
                half: u32 = (half / vector) as u32,
                pairs: u32 = (pairs / vector) as u32,
                groups: u32 = (heads / at_once) as u32,
                seq_length: u32 = seq_length as u32,
                rotated: u32 = rotated as u32,
                strides: Strides = steps(strides),
                out_strides: Strides = steps(out_strides),
                cos_stride: u32 = (cos_stride / vector) as u32,
                sin_stride: u32 = (sin_stride / vector) as u32,
                batch_step: u32 = batch_step as u32,
                token_step: u32 = token_step as u32,
                last: u32 = cos.meta.shape()[0] as u32 - 1,
                sign: f32 = if turn.inverse { -1.0 } else { 1.0 },
            ],
            [at_once: usize = at_once]
        );
    }
}

#[cube(launch_unchecked)]
fn rotary_kernel<F: Float, T: Float, I: Int, N: Size>(
    x: &Array<Vector<F, N>>,
    cos: &Array<Vector<T, N>>,
    sin: &Array<Vector<T, N>>,
    positions: &Array<I>,
    out: &mut Array<Vector<F, N>>,
    units: u32,
    half: u32,
    pairs: u32,
    groups: u32,
    seq_length: u32,
    rotated: u32,
    strides: &Strides,
    out_strides: &Strides,
    cos_stride: u32,
    sin_stride: u32,
    batch_step: u32,
    token_step: u32,
    last: u32,
    sign: f32,
    #[comptime] at_once: usize,
    #[define(F)] _dtype: StorageType,
    #[define(T)] _table_dtype: StorageType,
    #[define(I)] _position_dtype: StorageType,
) {
    let at = ABSOLUTE_POS as u32;
    if at >= units {
        terminate!();
    }
    let pair = at % pairs;
    let head = (at / pairs) % groups * comptime!(at_once as u32);
    let row = at / pairs / groups;
    let token = row % seq_length;
    let batch = row / seq_length;
    let x_at = batch * strides.batch + head * strides.head + token * strides.token;
    let out_at = batch * out_strides.batch + head * out_strides.head + token * out_strides.token;
    // Elements beyond the rotated ones, `2 * half ..`, are copied in pairs, too.
    let turns = pair < half;
    let one = select(turns, pair, pair + half);
    let other = select(turns, pair + half, pair + pairs);
    let column = min(pair, half - 1);

    // All loads precede the first store: in place, the compiler cannot reorder them.
    let mut first = Array::<Vector<F, N>>::new(at_once);
    let mut second = Array::<Vector<F, N>>::new(at_once);
    #[unroll]
    for i in 0..at_once {
        let x_at = x_at + i as u32 * strides.head;
        first[i] = x[(x_at + one) as usize];
        second[i] = x[(x_at + other) as usize];
    }
    let position = clamp_index::<I>(positions[(batch * batch_step + token * token_step) as usize], last);
    let cos = Vector::<f32, N>::cast_from(cos[(position * cos_stride + column) as usize]);
    let sin = Vector::<f32, N>::cast_from(sin[(position * sin_stride + column) as usize]) * Vector::new(sign);
    #[unroll]
    for i in 0..at_once {
        let a = Vector::<f32, N>::cast_from(first[i]);
        let b = Vector::<f32, N>::cast_from(second[i]);
        let mut rotated_first = Vector::<F, N>::cast_from(a * cos - b * sin);
        let mut rotated_second = Vector::<F, N>::cast_from(b * cos + a * sin);
        if !turns || head + i as u32 >= rotated {
            rotated_first = first[i];
            rotated_second = second[i];
        }
        let out_at = out_at + i as u32 * out_strides.head;
        out[(out_at + one) as usize] = rotated_first;
        out[(out_at + other) as usize] = rotated_second;
    }
}
