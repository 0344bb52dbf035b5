//! Scaled dot-product attention: causal, windowed or padded, grouped-query, with dropout.

mod autodiff;
#[cfg(feature = "ndarray")]
pub(crate) mod cpu;
#[cfg(feature = "cubecl")]
pub(crate) mod cubecl;
#[cfg(feature = "cuda")]
mod cuda;
pub(crate) mod reference;

use burn::tensor::backend::Backend;
use burn::tensor::{DType, Int, Tensor};

#[cfg(feature = "cuda")]
pub(crate) use self::cuda::{PagedHopper, ampere_sources, hopper_sources};
use super::dropout::Dropout;
use super::reshape::ReshapeOps;
use crate::checked::{Checked, Operands, Part, part};
use crate::mutation::{call, parts};
use crate::packed_heads::PackedHeads;
use crate::recorder::{self, Call};
use crate::selection::dispatch;

/// Maximum tokens of a sequence: kernels count them in 32 bits, with room for a window.
const MOST_TOKENS: usize = 1 << 30;

/// Visible keys of a query: at least one.
#[derive(Clone, Debug)]
pub enum AttentionMask<B: Backend> {
    /// All keys.
    None,
    /// Keys up to its own, with the last query at the last key; with a window, only that many, its
    /// own included.
    Causal {
        /// Maximum visible keys of a query, at least one.
        window: Option<usize>,
    },
    /// Keys up to its position, in a cache that may have unused space.
    Positions {
        /// Index of each query's own key, `[batch_size, seq_length]`. Values outside of `0..keys`
        /// count as the last.
        positions: Tensor<B, 2, Int>,
        /// Maximum visible keys of a query.
        window: Option<usize>,
    },
    /// The first `lengths` `[batch_size]` keys of a row padded on the right. Lengths are clamped to
    /// at least one and at most the number of keys.
    Lengths(Tensor<B, 1, Int>),
    /// Keys of its own document up to its own, in rows of several documents; as many keys as
    /// queries.
    Documents {
        /// Index in its row of the first token of each token's document, `[batch_size,
        /// seq_length]`. Values outside of `0..=i` for token `i` count as `i`.
        starts: Tensor<B, 2, Int>,
        /// Maximum visible keys of a query.
        window: Option<usize>,
    },
    /// A range of keys for each query, `[batch_size, seq_length, 2]`: the first and the last.
    /// Clamped, so that a query sees at least one key: the last to `0..keys`, the first to
    /// `0..=last`.
    Ranges(Tensor<B, 3, Int>),
}

/// Options of attention.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionOptions {
    /// Scale of the scores, usually `1 / sqrt(head_dim)`.
    pub scale: f64,
    /// Soft-capping: scaled scores `s` become `softcap * tanh(s / softcap)` (Gemma 2).
    pub softcap: Option<f64>,
    /// Dropout on the probabilities.
    pub dropout: Option<Dropout>,
}

impl AttentionOptions {
    /// No dropout and the usual scale.
    pub fn new(head_dim: usize) -> Self {
        Self { scale: 1.0 / (head_dim as f64).sqrt(), softcap: None, dropout: None }
    }

    /// Sets the scale of the scores.
    pub fn with_scale(self, scale: f64) -> Self {
        Self { scale, ..self }
    }

    /// Sets soft-capping of the scores.
    pub fn with_softcap(self, softcap: Option<f64>) -> Self {
        Self { softcap, ..self }
    }

    /// Panics if the cap is not above zero.
    #[track_caller]
    pub(crate) fn check(&self, op: &'static str) {
        let fits = self.softcap.is_none_or(|cap| cap.is_finite() && cap > 0.0);
        assert!(fits, "{op}: a softcap of {:?}, which is not above 0", self.softcap);
    }

    /// Sets dropout on the probabilities; a query's mask row is `(batch * n_heads + head) *
    /// seq_length + query`.
    pub fn with_dropout(mut self, dropout: Option<Dropout>) -> Self {
        self.dropout = dropout.filter(|dropout| dropout.probability > 0.0);
        self
    }
}

/// Results of the forward pass.
#[derive(Clone, Debug)]
pub struct AttentionOutput<B: Backend> {
    /// `[batch_size, seq_length, n_heads, head_dim]`, of the query's dtype.
    pub output: Tensor<B, 4>,
    /// Log-sum-exp of each row of scores, `[batch_size, n_heads, seq_length, 1]` f32.
    pub log_sum_exp: Tensor<B, 4>,
}

parts!(AttentionOutput { output, log_sum_exp });

/// Gradients, each shaped like its tensor.
#[derive(Clone, Debug)]
pub struct AttentionGradients<B: Backend> {
    /// `[batch_size, n_heads, seq_length, head_dim]`.
    pub query: Tensor<B, 4>,
    /// `[batch_size, n_kv_heads, keys, head_dim]`.
    pub key: Tensor<B, 4>,
    /// `[batch_size, n_kv_heads, keys, head_dim]`.
    pub value: Tensor<B, 4>,
}

parts!(AttentionGradients { query, key, value });

impl<B: Backend> AttentionMask<B> {
    /// FLOP of `count` products over the visible scores, of sizes `[batch_size, n_heads, queries,
    /// keys, head_dim]`. If only the device knows which are visible, all possible ones count.
    fn products(&self, count: u64, [batch_size, n_heads, queries, keys, head_dim]: [usize; 5]) -> u64 {
        let seen = match self {
            Self::Causal { window } | Self::Documents { window, .. } => {
                let window = window.unwrap_or(keys);
                (0..queries).map(|query| window.min((keys + query + 1).saturating_sub(queries))).sum()
            }
            _ => queries * keys,
        };
        2 * count * (batch_size * n_heads * seen * head_dim) as u64
    }

    /// Panics unless the mask suits `seq_length` queries, and as many keys, per row of `x`, and
    /// every query sees some key.
    #[track_caller]
    fn check(&self, op: &'static str, x: &Part<'_, B::Device>, [batch_size, seq_length, keys]: [usize; 3]) {
        assert!(seq_length.max(keys) <= MOST_TOKENS, "{op}: {} tokens are too many", seq_length.max(keys));
        match self {
            Self::None => {}
            Self::Causal { window } => {
                assert!(*window != Some(0), "{op}: a window of no keys");
                assert!(seq_length <= keys, "{op}: {seq_length} queries and {keys} keys: the first would see none");
            }
            Self::Positions { positions, window } => {
                assert!(*window != Some(0), "{op}: a window of no keys");
                part(op, "positions", positions).integer().shaped(&[batch_size, seq_length], x);
            }
            Self::Documents { starts, window } => {
                assert!(*window != Some(0), "{op}: a window of no keys");
                assert!(seq_length == keys, "{op}: {seq_length} queries and {keys} keys: documents want as many");
                part(op, "starts", starts).integer().shaped(&[batch_size, seq_length], x);
            }
            Self::Lengths(lengths) => {
                part(op, "lengths", lengths).integer().shaped(&[batch_size], x);
            }
            Self::Ranges(ranges) => {
                part(op, "ranges", ranges).integer().shaped(&[batch_size, seq_length, 2], x);
            }
        }
    }
}

/// Panics unless query, key and value fit together and the mask fits them.
#[track_caller]
fn check_heads<'a, B: Backend>(
    op: &'static str,
    [query, key, value]: [&Tensor<B, 4>; 3],
    mask: &AttentionMask<B>,
) -> Part<'a, B::Device> {
    let q = part(op, "query", query).float();
    let [batch_size, n_heads, seq_length, head_dim] = query.dims();
    let [rows, n_kv_heads, keys, width] = key.dims();
    let k = part(op, "key", key);
    let fits = [rows, width] == [batch_size, head_dim] && n_heads.is_multiple_of(n_kv_heads);
    let k = k.fits(fits, &q).alike(&q);
    part(op, "value", value).shaped(&key.dims(), &k).alike(&q);
    mask.check(op, &q, [batch_size, seq_length, keys]);
    q
}

/// Panics unless `qkv` has the width of `heads`, and the mask fits it.
#[track_caller]
fn check_packed<'a, B: Backend>(
    op: &'static str,
    qkv: &Tensor<B, 3>,
    heads: PackedHeads,
    mask: &AttentionMask<B>,
) -> Part<'a, B::Device> {
    let x = part(op, "qkv", qkv).float();
    let [batch_size, seq_length, _] = qkv.dims();
    heads.check(op, "qkv", qkv.dims());
    mask.check(op, &x, [batch_size, seq_length, seq_length]);
    x
}

impl<B: Backend> AttentionOutput<B> {
    /// Panics unless this is the result of a forward pass of these sizes, and `grad` its gradient.
    #[track_caller]
    fn check(
        &self,
        op: &'static str,
        grad: &Tensor<B, 4>,
        x: &Part<'_, B::Device>,
        [batch_size, n_heads, seq_length, head_dim]: [usize; 4],
    ) {
        let wanted = [batch_size, seq_length, n_heads, head_dim];
        part(op, "output", &self.output).shaped(&wanted, x).alike(x);
        part(op, "grad", grad).shaped(&wanted, x).alike(x);
        let wanted = [batch_size, n_heads, seq_length, 1];
        part(op, "log-sum-exp", &self.log_sum_exp).of(DType::F32).shaped(&wanted, x);
    }
}

/// Operands of [`attention`].
#[derive(Clone, Debug)]
pub struct AttentionForward<B: Backend> {
    /// `[batch_size, n_heads, seq_length, head_dim]`.
    pub query: Tensor<B, 4>,
    /// `[batch_size, n_kv_heads, keys, head_dim]`.
    pub key: Tensor<B, 4>,
    /// As `key`.
    pub value: Tensor<B, 4>,
    /// Which keys a query sees.
    pub mask: AttentionMask<B>,
    /// Scale and dropout.
    pub options: AttentionOptions,
}

impl<B: Backend> Operands for AttentionForward<B> {
    fn check(&self) {
        check_heads("attention", [&self.query, &self.key, &self.value], &self.mask);
        self.options.check("attention");
    }
}

/// Operands of the gradients of [`attention`].
#[derive(Clone, Debug)]
pub struct AttentionBackward<B: Backend> {
    /// Gradient of the output, `[batch_size, seq_length, n_heads, head_dim]`.
    pub grad: Tensor<B, 4>,
    /// As in the forward pass.
    pub query: Tensor<B, 4>,
    /// As in the forward pass.
    pub key: Tensor<B, 4>,
    /// As in the forward pass.
    pub value: Tensor<B, 4>,
    /// From the forward pass.
    pub saved: AttentionOutput<B>,
    /// As in the forward pass.
    pub mask: AttentionMask<B>,
    /// As in the forward pass.
    pub options: AttentionOptions,
}

impl<B: Backend> Operands for AttentionBackward<B> {
    fn check(&self) {
        let op = "attention backward";
        let query = check_heads(op, [&self.query, &self.key, &self.value], &self.mask);
        self.options.check(op);
        self.saved.check(op, &self.grad, &query, self.query.dims());
    }
}

/// Operands of [`qkv_attention`].
#[derive(Clone, Debug)]
pub struct QkvAttentionForward<B: Backend> {
    /// `[batch_size, seq_length, width]`.
    pub qkv: Tensor<B, 3>,
    /// The layout of its heads.
    pub heads: PackedHeads,
    /// Which keys a query sees.
    pub mask: AttentionMask<B>,
    /// Scale and dropout.
    pub options: AttentionOptions,
}

impl<B: Backend> Operands for QkvAttentionForward<B> {
    fn check(&self) {
        check_packed("qkv_attention", &self.qkv, self.heads, &self.mask);
        self.options.check("qkv_attention");
    }
}

/// Operands of the gradient of [`qkv_attention`].
#[derive(Clone, Debug)]
pub struct QkvAttentionBackward<B: Backend> {
    /// Gradient of the output, `[batch_size, seq_length, n_heads, head_dim]`.
    pub grad: Tensor<B, 4>,
    /// As in the forward pass.
    pub qkv: Tensor<B, 3>,
    /// As in the forward pass.
    pub heads: PackedHeads,
    /// From the forward pass.
    pub saved: AttentionOutput<B>,
    /// As in the forward pass.
    pub mask: AttentionMask<B>,
    /// As in the forward pass.
    pub options: AttentionOptions,
}

impl<B: Backend> Operands for QkvAttentionBackward<B> {
    fn check(&self) {
        let op = "qkv_attention backward";
        let qkv = check_packed(op, &self.qkv, self.heads, &self.mask);
        self.options.check(op);
        let ([batch_size, seq_length, _], heads) = (self.qkv.dims(), self.heads);
        self.saved.check(op, &self.grad, &qkv, [batch_size, heads.n_heads, seq_length, heads.head_dim]);
    }
}

/// Attention of a backend.
pub trait AttentionOps: ReshapeOps {
    /// [`attention`], `[batch_size, seq_length, n_heads, head_dim]`;
    /// [`Autodiff`](burn::backend::Autodiff) ties forward and backward together here.
    fn attention(operands: Checked<AttentionForward<Self>>) -> Tensor<Self, 4> {
        attention_forward(operands).output
    }
    /// Forward of [`attention`], with the log-sum-exp of every row of scores.
    fn attention_forward(operands: Checked<AttentionForward<Self>>) -> AttentionOutput<Self> {
        reference::attention_forward(operands.into_inner())
    }
    /// Backward of [`attention`].
    fn attention_backward(operands: Checked<AttentionBackward<Self>>) -> AttentionGradients<Self> {
        reference::attention_backward(operands.into_inner())
    }

    /// [`qkv_attention`]; otherwise like [`attention`](Self::attention).
    fn qkv_attention(operands: Checked<QkvAttentionForward<Self>>) -> Tensor<Self, 4> {
        qkv_attention_forward(operands).output
    }
    /// Forward of [`qkv_attention`].
    fn qkv_attention_forward(operands: Checked<QkvAttentionForward<Self>>) -> AttentionOutput<Self> {
        reference::qkv_attention_forward(operands.into_inner())
    }
    /// Backward of [`qkv_attention`]: one gradient, packed like its input.
    fn qkv_attention_backward(operands: Checked<QkvAttentionBackward<Self>>) -> Tensor<Self, 3> {
        reference::qkv_attention_backward(operands.into_inner())
    }
}

/// `softmax(scale * query * key^T) * value` (Vaswani et al., 2017), with concatenated heads, ready
/// for the output projection. Scores may be soft-capped before masking (Gemma 2, 2024).
///
/// - `query`: `[batch_size, n_heads, seq_length, head_dim]`;
/// - `key`, `value`: `[batch_size, n_kv_heads, keys, head_dim]`, where `n_kv_heads` divides
///   `n_heads`, and key head `j` serves the query heads `j * n_heads / n_kv_heads ..` (Ainslie et
///   al., 2023);
/// - the result: `[batch_size, seq_length, n_heads * head_dim]` in the dtype of the query.
///
/// Scores, softmax and log-sum-exp are f32. Inputs may be strided.
///
/// # Panics
/// If batch, lengths or head sizes do not fit each other, or `n_kv_heads` does not divide
/// `n_heads`.
pub fn attention<B: AttentionOps>(
    query: Tensor<B, 4>,
    key: Tensor<B, 4>,
    value: Tensor<B, 4>,
    mask: &AttentionMask<B>,
    options: AttentionOptions,
) -> Tensor<B, 3> {
    let [batch_size, n_heads, seq_length, head_dim] = query.dims();
    let _op = recorder::op("attention", || {
        let flops = mask.products(2, [batch_size, n_heads, seq_length, key.dims()[2], head_dim]);
        let inputs = [recorder::operand(&query), recorder::operand(&key), recorder::operand(&value)];
        Call::reads(inputs).and_first(1).computes(flops)
    });
    let output = attention_heads(AttentionForward { query, key, value, mask: mask.clone(), options });
    B::reshape(output, [batch_size, seq_length, n_heads * head_dim])
}

/// The weights that [`attention`] gives each key, without dropout: f32 `[batch_size, n_heads,
/// seq_length, keys]`, whose rows sum to one. For inspection: attention itself never stores them.
///
/// Operands as in [`attention`]; computed by the reference on every backend.
///
/// # Panics
/// If batch, lengths or head sizes do not fit each other, or `n_kv_heads` does not divide
/// `n_heads`.
pub fn attention_weights<B: AttentionOps>(
    query: Tensor<B, 4>,
    key: Tensor<B, 4>,
    mask: &AttentionMask<B>,
    options: AttentionOptions,
) -> Tensor<B, 4> {
    let _op = recorder::op("attention_weights", || vec![recorder::operand(&query), recorder::operand(&key)]);
    let value = key.clone();
    let operands = Checked::new(AttentionForward { query, key, value, mask: mask.clone(), options });
    reference::attention_weights(operands.into_inner())
}

/// Bytes and FLOP of attention over packed heads: two products forward; five backward, which also
/// reads output and gradient, and writes a gradient as large as `qkv`.
fn packed_call<B: Backend>(qkv: &Tensor<B, 3>, heads: PackedHeads, mask: &AttentionMask<B>, backward: bool) -> Call {
    let [batch_size, seq_length, width] = qkv.dims();
    let PackedHeads { n_heads, head_dim, .. } = heads;
    let qkv = recorder::operand(qkv);
    let output = qkv.bytes() * (n_heads * head_dim) as u64 / width.max(1) as u64;
    let sizes = [batch_size, n_heads, seq_length, seq_length, head_dim];
    match backward {
        false => Call::reads([qkv]).and(output).computes(mask.products(2, sizes)),
        true => Call::reads([qkv]).and_first(1).and(2 * output).computes(mask.products(5, sizes)),
    }
}

/// [`attention`] with separate heads, as a part of another operation.
pub(crate) fn attention_heads<B: AttentionOps>(operands: AttentionForward<B>) -> Tensor<B, 4> {
    call!(B: AttentionOps::attention(Checked::new(operands)))
}

/// [`attention`] of packed queries, keys and values, the output of a joint projection.
///
/// `qkv` is `[batch_size, seq_length, (n_heads + 2 * n_kv_heads) * head_dim]`; the result is
/// `[batch_size, seq_length, n_heads * head_dim]` in its dtype. The gradient is packed, too.
///
/// # Panics
/// If the width of `qkv` does not match `heads`, the mask has another shape, or `n_kv_heads` does
/// not divide `n_heads`.
pub fn qkv_attention<B: AttentionOps>(
    qkv: Tensor<B, 3>,
    heads: PackedHeads,
    mask: &AttentionMask<B>,
    options: AttentionOptions,
) -> Tensor<B, 3> {
    let _op = recorder::op("qkv_attention", || packed_call(&qkv, heads, mask, false));
    let [batch_size, seq_length, _] = qkv.dims();
    let operands = QkvAttentionForward { qkv, heads, mask: mask.clone(), options };
    let output = call!(B: AttentionOps::qkv_attention(Checked::new(operands)));
    B::reshape(output, [batch_size, seq_length, heads.n_heads * heads.head_dim])
}

pub(crate) fn attention_forward<B: AttentionOps>(operands: Checked<AttentionForward<B>>) -> AttentionOutput<B> {
    dispatch!(B: AttentionOps::attention_forward(operands))
}

pub(crate) fn attention_backward<B: AttentionOps>(operands: Checked<AttentionBackward<B>>) -> AttentionGradients<B> {
    dispatch!(B: AttentionOps::attention_backward(operands))
}

pub(crate) fn qkv_attention_forward<B: AttentionOps>(operands: Checked<QkvAttentionForward<B>>) -> AttentionOutput<B> {
    dispatch!(B: AttentionOps::qkv_attention_forward(operands))
}

pub(crate) fn qkv_attention_backward<B: AttentionOps>(operands: Checked<QkvAttentionBackward<B>>) -> Tensor<B, 3> {
    dispatch!(B: AttentionOps::qkv_attention_backward(operands))
}
