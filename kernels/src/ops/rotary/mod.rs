//! Rotary position embedding.

mod autodiff;
#[cfg(feature = "ndarray")]
pub(crate) mod cpu;
#[cfg(feature = "cubecl")]
pub(crate) mod cubecl;
pub(crate) mod reference;

use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor};

use crate::checked::{Checked, Operands, Part, part};
use crate::mutation::call;
use crate::packed_heads::PackedHeads;
use crate::recorder::{self, Call};
use crate::selection::dispatch;
use crate::tensor::row_after_row;

/// Cosines and sines of every position's angles, f32.
#[derive(Clone, Debug)]
pub struct RotaryTable<B: Backend> {
    /// `[positions, head_dim / 2]`.
    pub cos: Tensor<B, 2>,
    /// `[positions, head_dim / 2]`.
    pub sin: Tensor<B, 2>,
}

impl<B: Backend> RotaryTable<B> {
    /// The table of `positions` positions for the given `frequencies`, in radians per position, one
    /// per pair of elements; cosines and sines are multiplied by `magnitude` (one, except for
    /// YaRN).
    pub fn new(positions: usize, frequencies: &[f64], magnitude: f64, device: &B::Device) -> Self {
        let table = |f: fn(f64) -> f64| {
            let values: Vec<f32> = (0..positions)
                .flat_map(|position| frequencies.iter().map(move |w| (f(position as f64 * w) * magnitude) as f32))
                .collect();
            row_after_row(values, [positions, frequencies.len()], device)
        };
        Self { cos: table(f64::cos), sin: table(f64::sin) }
    }
}

impl<B: Backend> RotaryTable<B> {
    /// Panics unless the table has columns for heads of `head_dim`, or for the first elements of
    /// them.
    #[track_caller]
    pub(crate) fn check_part(&self, op: &'static str, x: &Part<'_, B::Device>, head_dim: usize) {
        let [_, half] = self.cos.dims();
        let fits = head_dim.is_multiple_of(2) && (1..=head_dim / 2).contains(&half);
        let cos = part(op, "cosines", &self.cos).float().fits(fits, x);
        part(op, "sines", &self.sin).shaped(&self.cos.dims(), &cos).alike(&cos);
    }

    /// Panics unless the table has columns for heads of `head_dim`.
    #[track_caller]
    pub(crate) fn check(&self, op: &'static str, x: &Part<'_, B::Device>, head_dim: usize) {
        let [_, half] = self.cos.dims();
        let cos = part(op, "cosines", &self.cos).float().fits(half.checked_mul(2) == Some(head_dim), x);
        part(op, "sines", &self.sin).shaped(&self.cos.dims(), &cos).alike(&cos);
    }
}

/// Operands of [`rotary`].
#[derive(Clone, Debug)]
pub struct RotaryForward<B: Backend> {
    /// `[batch_size, heads, seq_length, head_dim]`.
    pub x: Tensor<B, 4>,
    /// `[.., head_dim / 2]`, or narrower if only the first elements of a head rotate.
    pub table: RotaryTable<B>,
    /// `[batch_size, seq_length]`.
    pub positions: Tensor<B, 2, Int>,
    /// Whether to rotate back, which is also the gradient.
    pub inverse: bool,
}

impl<B: Backend> Operands for RotaryForward<B> {
    fn check(&self) {
        let x = part("rotary", "x", &self.x).float();
        let [batch_size, _, seq_length, head_dim] = self.x.dims();
        self.table.check_part("rotary", &x, head_dim);
        part("rotary", "positions", &self.positions).integer().shaped(&[batch_size, seq_length], &x);
    }
}

/// Operands of [`qkv_rotary`].
#[derive(Clone, Debug)]
pub struct QkvRotaryForward<B: Backend> {
    /// `[batch_size, seq_length, width]`.
    pub qkv: Tensor<B, 3>,
    /// The layout of its heads.
    pub heads: PackedHeads,
    /// `[.., head_dim / 2]`, or narrower if only the first elements of a head rotate.
    pub table: RotaryTable<B>,
    /// `[batch_size, seq_length]`.
    pub positions: Tensor<B, 2, Int>,
    /// Whether to rotate back, which is also the gradient.
    pub inverse: bool,
}

impl<B: Backend> Operands for QkvRotaryForward<B> {
    fn check(&self) {
        let x = part("qkv_rotary", "qkv", &self.qkv).float();
        let [batch_size, seq_length, _] = self.qkv.dims();
        self.heads.check("qkv_rotary", "qkv", self.qkv.dims());
        self.table.check_part("qkv_rotary", &x, self.heads.head_dim);
        part("qkv_rotary", "positions", &self.positions).integer().shaped(&[batch_size, seq_length], &x);
    }
}

/// Operands of [`next_positions`].
#[derive(Clone, Debug)]
pub struct NextPositions<B: Backend> {
    /// `[batch_size, seq_length]`.
    pub positions: Tensor<B, 2, Int>,
    /// The last valid position.
    pub last: usize,
}

impl<B: Backend> Operands for NextPositions<B> {
    fn check(&self) {
        part("next_positions", "positions", &self.positions).integer();
        assert!(i32::try_from(self.last).is_ok(), "next_positions: place {} is too far", self.last);
    }
}

/// Rotary embedding of a backend.
pub trait RotaryOps: Backend {
    /// [`rotary`]; [`Autodiff`](burn::backend::Autodiff) ties it and its inverse together here.
    fn rotary(operands: Checked<RotaryForward<Self>>) -> Tensor<Self, 4> {
        rotary_forward(operands)
    }
    /// Forward of [`rotary`], and with `inverse` its backward.
    fn rotary_forward(operands: Checked<RotaryForward<Self>>) -> Tensor<Self, 4> {
        reference::rotary_forward(operands.into_inner())
    }
    /// [`qkv_rotary`]; otherwise like [`rotary`](Self::rotary).
    fn qkv_rotary(operands: Checked<QkvRotaryForward<Self>>) -> Tensor<Self, 3> {
        qkv_rotary_forward(operands)
    }
    /// Forward of [`qkv_rotary`], and with `inverse` its backward.
    fn qkv_rotary_forward(operands: Checked<QkvRotaryForward<Self>>) -> Tensor<Self, 3> {
        reference::qkv_rotary_forward(operands.into_inner())
    }
    /// [`next_positions`].
    fn next_positions(operands: Checked<NextPositions<Self>>) -> Tensor<Self, 2, Int> {
        reference::next_positions(operands.into_inner())
    }
}

/// Rotates pairs of elements of `x` `[batch_size, heads, seq_length, head_dim]` by their token's
/// position (Su et al., 2021), in the hub's layout: element `i` pairs with `i + head_dim / 2`.
/// With a narrower table, of `half` columns, only the first `2 * half` elements rotate, `i` with
/// `i + half`; the others stay unchanged.
///
/// `positions` `[batch_size, seq_length]` index the table's rows; an invalid one counts as the
/// last. Computes in f32 and returns the dtype of `x`.
///
/// # Panics
/// If the table has no or more than `head_dim / 2` columns, `head_dim` is odd, or the number of
/// positions differs from that of tokens.
pub fn rotary<B: RotaryOps>(x: Tensor<B, 4>, table: &RotaryTable<B>, positions: Tensor<B, 2, Int>) -> Tensor<B, 4> {
    let _op = recorder::op("rotary", || Call::reads([recorder::operand(&x)]).and_first(1));
    rotary_heads(x, table, positions)
}

/// [`rotary`] as a part of another operation.
pub(crate) fn rotary_heads<B: RotaryOps>(
    x: Tensor<B, 4>,
    table: &RotaryTable<B>,
    positions: Tensor<B, 2, Int>,
) -> Tensor<B, 4> {
    let operands = RotaryForward { x, table: table.clone(), positions, inverse: false };
    call!(B: RotaryOps::rotary(Checked::new(operands)))
}

/// [`rotary`] of the query and key heads of packed `qkv` `[batch_size, seq_length, width]`; the
/// value heads stay unchanged.
///
/// # Panics
/// If `width` does not match `heads`, the table has no or more than `head_dim / 2` columns,
/// `head_dim` is odd, or the number of positions differs from that of tokens.
pub fn qkv_rotary<B: RotaryOps>(
    qkv: Tensor<B, 3>,
    heads: PackedHeads,
    table: &RotaryTable<B>,
    positions: Tensor<B, 2, Int>,
) -> Tensor<B, 3> {
    let _op = recorder::op("qkv_rotary", || Call::reads([recorder::operand(&qkv)]).and_first(1));
    let operands = QkvRotaryForward { qkv, heads, table: table.clone(), positions, inverse: false };
    call!(B: RotaryOps::qkv_rotary(Checked::new(operands)))
}

/// Each of `positions` `[batch_size, seq_length]` plus one, up to `last`: the positions of the next
/// tokens.
///
/// # Panics
/// If `last` is above 2^31.
pub fn next_positions<B: RotaryOps>(positions: Tensor<B, 2, Int>, last: usize) -> Tensor<B, 2, Int> {
    let _op = recorder::op("next_positions", || Call::reads([recorder::operand(&positions)]).and_first(1));
    dispatch!(B: RotaryOps::next_positions(Checked::new(NextPositions { positions, last })))
}

pub(crate) fn rotary_forward<B: RotaryOps>(operands: Checked<RotaryForward<B>>) -> Tensor<B, 4> {
    dispatch!(B: RotaryOps::rotary_forward(operands))
}

pub(crate) fn qkv_rotary_forward<B: RotaryOps>(operands: Checked<QkvRotaryForward<B>>) -> Tensor<B, 3> {
    dispatch!(B: RotaryOps::qkv_rotary_forward(operands))
}
