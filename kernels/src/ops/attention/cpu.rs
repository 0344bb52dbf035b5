//! Attention on the CPU: tiles of queries against the keys that any of them sees, with a task per
//! key head and row.

use burn::tensor::Tensor;
use burn_ndarray::NdArray;
use rayon::prelude::*;
use std::ops::Range;

use super::{
    AttentionBackward, AttentionForward, AttentionGradients, AttentionMask, AttentionOps, AttentionOptions,
    AttentionOutput, QkvAttentionBackward, QkvAttentionForward,
};
use crate::checked::Checked;
use crate::cpu::{Matrix, Values, clamp_index, exp, integers, max_of, product, sum_of, tensor, vectorised, zeros};
use crate::packed_heads::PackedHeads;

/// Queries per tile.
const TILE: usize = 64;

/// Sizes, mask and options of forward and backward.
struct Problem {
    batch_size: usize,
    n_heads: usize,
    n_kv_heads: usize,
    seq_length: usize,
    keys: usize,
    head_dim: usize,
    mask: Visible,
    options: AttentionOptions,
}

enum Visible {
    All,
    Causal(Option<usize>),
    Positions(Vec<i64>, Option<usize>),
    Lengths(Vec<i64>),
    Documents(Vec<i64>, Option<usize>),
    Ranges(Vec<i64>),
}

impl Problem {
    /// For queries and keys of these sizes.
    fn new(
        [batch_size, n_heads, seq_length, head_dim]: [usize; 4],
        [_, n_kv_heads, keys, _]: [usize; 4],
        mask: &AttentionMask<NdArray>,
        options: AttentionOptions,
    ) -> Self {
        let mask = match mask.clone() {
            AttentionMask::None => Visible::All,
            AttentionMask::Causal { window } => Visible::Causal(window),
            AttentionMask::Positions { positions, window } => Visible::Positions(integers(positions), window),
            AttentionMask::Lengths(lengths) => Visible::Lengths(integers(lengths)),
            AttentionMask::Documents { starts, window } => Visible::Documents(integers(starts), window),
            AttentionMask::Ranges(ranges) => Visible::Ranges(integers(ranges)),
        };
        Self { batch_size, n_heads, n_kv_heads, seq_length, keys, head_dim, mask, options }
    }

    /// For packed queries, keys and values.
    fn packed(
        [batch_size, seq_length, _]: [usize; 3],
        heads: PackedHeads,
        mask: &AttentionMask<NdArray>,
        options: AttentionOptions,
    ) -> Self {
        let sizes = |count: usize| [batch_size, count, seq_length, heads.head_dim];
        Self::new(sizes(heads.n_heads), sizes(heads.n_kv_heads), mask, options)
    }

    /// The keys that a query sees.
    fn visible(&self, batch: usize, query: usize) -> Range<usize> {
        let last = |at: i64, window: Option<usize>| {
            let end = (at + 1).clamp(0, self.keys as i64);
            let start = window.map_or(0, |window| (at + 1).saturating_sub_unsigned(window as u64).clamp(0, end));
            start as usize..end as usize
        };
        match &self.mask {
            Visible::All => 0..self.keys,
            Visible::Causal(window) => last((query + self.keys) as i64 - self.seq_length as i64, *window),
            Visible::Positions(positions, window) => {
                let at = clamp_index(positions[batch * self.seq_length + query], self.keys - 1);
                last(at as i64, *window)
            }
            Visible::Documents(starts, window) => {
                let start = clamp_index(starts[batch * self.seq_length + query], query);
                let seen = last(query as i64, *window);
                seen.start.max(start)..seen.end
            }
            Visible::Ranges(ranges) => {
                let at = 2 * (batch * self.seq_length + query);
                let last = ranges[at + 1].clamp(0, self.keys as i64 - 1);
                ranges[at].clamp(0, last) as usize..last as usize + 1
            }
            Visible::Lengths(lengths) => 0..(lengths[batch].max(1) as usize).min(self.keys),
        }
    }

    /// The tiles of queries, each with the range of keys that any of its queries sees.
    fn tiles(&self, batch: usize) -> impl Iterator<Item = (Range<usize>, Range<usize>)> + '_ {
        (0..self.seq_length).step_by(TILE).map(move |start| {
            let queries = start..self.seq_length.min(start + TILE);
            let seen = queries.clone().map(|query| self.visible(batch, query)).filter(|seen| !seen.is_empty());
            let seen = seen.reduce(|a, b| a.start.min(b.start)..a.end.max(b.end)).unwrap_or(0..0);
            (queries, seen)
        })
    }

    /// Work per key head and row, on all cores.
    fn for_groups(&self, work: impl Fn(usize, usize) + Sync) {
        let groups = self.batch_size * self.n_kv_heads;
        (0..groups).into_par_iter().for_each(|group| work(group / self.n_kv_heads, group % self.n_kv_heads));
    }

    /// The query heads of key head `kv`.
    fn heads(&self, kv: usize) -> Range<usize> {
        let group = self.n_heads / self.n_kv_heads;
        kv * group..(kv + 1) * group
    }

    /// Applies dropout to a row of a tile's probabilities or their gradients.
    #[inline(always)]
    fn drop(&self, batch: usize, head: usize, query: usize, seen: &Range<usize>, row: &mut [f32]) {
        let Some(dropout) = self.options.dropout else { return };
        let (threshold, scale) = (dropout.threshold(), dropout.scale() as f32);
        let line = ((batch * self.n_heads + head) * self.seq_length + query) as u32;
        dropout.key.row(line).drop(seen.start as u32, row, threshold, scale);
    }
}

/// Heads `[batch_size, heads, tokens, head_dim]` with any strides.
#[derive(Clone, Copy)]
struct Heads {
    pointer: *mut f32,
    strides: [isize; 4],
}

// SAFETY: the threads of `Problem::for_groups` read shared heads and write disjoint ones.
unsafe impl Send for Heads {}
// SAFETY: as above.
unsafe impl Sync for Heads {}

impl Heads {
    fn of(values: &Values) -> Self {
        let mut strides = [0; 4];
        strides.copy_from_slice(values.strides());
        Self { pointer: values.pointer().cast_mut(), strides }
    }

    /// Heads of queries, keys and values stored as `[batch_size, tokens, width]` at `pointer`.
    fn of_packed(pointer: *mut f32, tokens: usize, heads: PackedHeads) -> [Self; 3] {
        let token = heads.width() as isize;
        let strides = [tokens as isize * token, heads.head_dim as isize, token, 1];
        let firsts = [0, heads.n_heads, heads.n_heads + heads.n_kv_heads];
        firsts.map(|head| Self { pointer: pointer.wrapping_add(head * heads.head_dim), strides })
    }

    /// Heads stored as `[batch_size, tokens, heads, head_dim]`.
    fn of_tokens(values: &mut [f32], [tokens, heads, head_dim]: [usize; 3]) -> Self {
        Self { pointer: values.as_mut_ptr(), strides: token_strides(tokens, heads, head_dim) }
    }

    /// Address of a token's first element in a head.
    ///
    /// # Safety
    /// The indices must lie within the tensor.
    unsafe fn token(self, batch: usize, head: usize, token: usize) -> *mut f32 {
        let [b, h, t, _] = self.strides;
        // SAFETY: passed on to the caller.
        unsafe { self.pointer.offset(batch as isize * b + head as isize * h + token as isize * t) }
    }

    /// The matrix `[tokens, head_dim]` of a head, from token `first` on.
    ///
    /// # Safety
    /// The indices must lie within the tensor.
    unsafe fn matrix(self, batch: usize, head: usize, first: usize) -> Matrix {
        // SAFETY: passed on to the caller.
        Matrix::at(unsafe { self.token(batch, head, first) }, self.strides[2], self.strides[3])
    }
}

impl AttentionOps for NdArray {
    fn attention_forward(operands: Checked<AttentionForward<Self>>) -> AttentionOutput<Self> {
        let AttentionForward { query, key, value, mask, options } = operands.into_inner();
        let problem = Problem::new(query.dims(), key.dims(), &mask, options);
        let [query, key, value] = [query, key, value].map(Values::strided);
        forward(&problem, [&query, &key, &value].map(Heads::of))
    }

    fn attention_backward(operands: Checked<AttentionBackward<Self>>) -> AttentionGradients<Self> {
        attention_backward(operands.into_inner())
    }

    fn qkv_attention_forward(operands: Checked<QkvAttentionForward<Self>>) -> AttentionOutput<Self> {
        let QkvAttentionForward { qkv, heads, mask, options } = operands.into_inner();
        let problem = Problem::packed(qkv.dims(), heads, &mask, options);
        let qkv = Values::rows(qkv);
        forward(&problem, Heads::of_packed(qkv.pointer().cast_mut(), problem.seq_length, heads))
    }

    fn qkv_attention_backward(operands: Checked<QkvAttentionBackward<Self>>) -> Tensor<Self, 3> {
        qkv_attention_backward(operands.into_inner())
    }
}

/// Causal attention of packed queries `[tokens, width]`, the last of `keys` tokens, over keys and
/// values `[n_kv_heads, capacity, head_dim]`, with the heads' sinks if given: into `out` `[tokens,
/// n_heads, head_dim]`.
pub(crate) fn attention_over(
    qkv: &[f32],
    heads: PackedHeads,
    [key, value]: [&[f32]; 2],
    keys: usize,
    (window, options, sinks): (Option<usize>, AttentionOptions, Option<&[f32]>),
    out: &mut [f32],
) {
    let PackedHeads { n_heads, n_kv_heads, head_dim } = heads;
    let tokens = qkv.len() / heads.width();
    let capacity = key.len() / (n_kv_heads * head_dim);
    assert!(qkv.len() == tokens * heads.width() && tokens <= keys, "{tokens} of {keys} tokens");
    assert!(keys <= capacity && key.len() == value.len(), "{keys} keys of {capacity}");
    let mask = AttentionMask::Causal { window };
    let problem = Problem { keys, ..Problem::packed([1, tokens, heads.width()], heads, &mask, options) };
    let [queries, ..] = Heads::of_packed(qkv.as_ptr().cast_mut(), tokens, heads);
    let strides = [0, (capacity * head_dim) as isize, head_dim as isize, 1];
    let [key, value] = [key, value].map(|values| Heads { pointer: values.as_ptr().cast_mut(), strides });
    let mut log_sum_exp = zeros(n_heads * tokens);
    forward_into(&problem, [queries, key, value], out, &mut log_sum_exp);
    for (at, out) in out.chunks_exact_mut(head_dim).enumerate() {
        let Some(sinks) = sinks else { return };
        let (token, head) = (at / n_heads, at % n_heads);
        let share = 1.0 / (1.0 + (sinks[head] - log_sum_exp[head * tokens + token]).exp());
        out.iter_mut().for_each(|out| *out *= share);
    }
}

/// Output and log-sum-exp, for heads that outlive the call.
fn forward(problem: &Problem, [q, k, v]: [Heads; 3]) -> AttentionOutput<NdArray> {
    let Problem { batch_size, n_heads, seq_length, head_dim, .. } = *problem;
    let mut output = zeros(batch_size * seq_length * n_heads * head_dim);
    let mut log_sum_exp = zeros(batch_size * n_heads * seq_length);
    forward_into(problem, [q, k, v], &mut output, &mut log_sum_exp);
    AttentionOutput {
        output: tensor(output, [batch_size, seq_length, n_heads, head_dim]),
        log_sum_exp: tensor(log_sum_exp, [batch_size, n_heads, seq_length, 1]),
    }
}

/// [`forward`] into `output` `[batch_size, seq_length, n_heads, head_dim]` and `log_sum_exp`
/// `[batch_size, n_heads, seq_length]`.
fn forward_into(problem: &Problem, [q, k, v]: [Heads; 3], output: &mut [f32], log_sum_exp: &mut [f32]) {
    let Problem { batch_size, n_heads, seq_length, head_dim, .. } = *problem;
    assert!(output.len() == batch_size * seq_length * n_heads * head_dim);
    assert!(log_sum_exp.len() == batch_size * n_heads * seq_length);
    let out = Heads::of_tokens(output, [seq_length, n_heads, head_dim]);
    // One value per query, as heads of width one.
    let sums = Heads {
        pointer: log_sum_exp.as_mut_ptr(),
        strides: [(n_heads * seq_length) as isize, seq_length as isize, 1, 1],
    };
    problem.for_groups(|batch, kv| {
        let mut tile = Vec::new();
        for head in problem.heads(kv) {
            for (queries, seen) in problem.tiles(batch) {
                let (rows, columns) = (queries.len(), seen.len());
                let tile = first_of(&mut tile, rows * columns);
                // SAFETY: all indices come from the tensors' sizes; no other group writes this head
                // of `out` or
                // `sums`.
                unsafe {
                    let keys = k.matrix(batch, kv, seen.start).transposed();
                    let queries_matrix = q.matrix(batch, head, queries.start);
                    let scores = Matrix::of_mut(tile, columns);
                    product([rows, head_dim, columns], scores, queries_matrix, keys, false);
                    for (query, row) in queries.clone().zip(tile.chunks_exact_mut(columns.max(1))) {
                        let sum = softmax(problem, batch, query, &seen, row);
                        problem.drop(batch, head, query, &seen, row);
                        *sums.token(batch, head, query) = sum;
                    }
                    let (probabilities, values) = (Matrix::of(tile, columns), v.matrix(batch, kv, seen.start));
                    let out = out.matrix(batch, head, queries.start);
                    product([rows, columns, head_dim], out, probabilities, values, false);
                }
            }
        }
    });
}

/// Converts a row of raw scores to probabilities, and returns its log-sum-exp.
fn softmax(problem: &Problem, batch: usize, query: usize, seen: &Range<usize>, row: &mut [f32]) -> f32 {
    let visible = problem.visible(batch, query);
    let (from, to) = (visible.start - seen.start, visible.end - seen.start);
    let scale = problem.options.scale as f32;
    vectorised(
        #[inline(always)]
        || {
            row[..from].fill(0.0);
            row[to..].fill(0.0);
            let row = &mut row[from..to];
            row.iter_mut().for_each(|x| *x *= scale);
            problem.options.cap(row);
            let max = max_of(row);
            row.iter_mut().for_each(|x| *x = exp(*x - max));
            let sum = sum_of(row, row, |x, _| x);
            let inverse = 1.0 / sum;
            row.iter_mut().for_each(|x| *x *= inverse);
            max + sum.ln()
        },
    )
}

fn attention_backward(operands: AttentionBackward<NdArray>) -> AttentionGradients<NdArray> {
    let AttentionBackward { grad, query, key, value, saved, mask, options } = operands;
    let problem = Problem::new(query.dims(), key.dims(), &mask, options);
    let Problem { batch_size, n_heads, n_kv_heads, seq_length, keys, head_dim, .. } = problem;
    let mut d_query = zeros(batch_size * seq_length * n_heads * head_dim);
    let mut d_key = zeros(batch_size * keys * n_kv_heads * head_dim);
    let mut d_value = zeros(batch_size * keys * n_kv_heads * head_dim);
    let into = [
        Heads::of_tokens(&mut d_query, [seq_length, n_heads, head_dim]),
        Heads::of_tokens(&mut d_key, [keys, n_kv_heads, head_dim]),
        Heads::of_tokens(&mut d_value, [keys, n_kv_heads, head_dim]),
    ];
    let [query, key, value] = [query, key, value].map(Values::strided);
    gradients_into(into, grad, [&query, &key, &value].map(Heads::of), saved, &problem);
    AttentionGradients {
        query: tensor(d_query, [batch_size, seq_length, n_heads, head_dim]).swap_dims(1, 2),
        key: tensor(d_key, [batch_size, keys, n_kv_heads, head_dim]).swap_dims(1, 2),
        value: tensor(d_value, [batch_size, keys, n_kv_heads, head_dim]).swap_dims(1, 2),
    }
}

fn qkv_attention_backward(operands: QkvAttentionBackward<NdArray>) -> Tensor<NdArray, 3> {
    let QkvAttentionBackward { grad, qkv, heads, saved, mask, options } = operands;
    let shape = qkv.dims();
    let problem = Problem::packed(shape, heads, &mask, options);
    let qkv = Values::rows(qkv);
    let mut packed = zeros(qkv.len());
    let into = Heads::of_packed(packed.as_mut_ptr(), problem.seq_length, heads);
    let inputs = Heads::of_packed(qkv.pointer().cast_mut(), problem.seq_length, heads);
    gradients_into(into, grad, inputs, saved, &problem);
    tensor(packed, shape)
}

/// Adds the gradients of queries, keys and values to zeroed heads. The inputs outlive the call.
fn gradients_into(
    [dq, dk, dv]: [Heads; 3],
    grad: Tensor<NdArray, 4>,
    [q, k, v]: [Heads; 3],
    saved: AttentionOutput<NdArray>,
    problem: &Problem,
) {
    let Problem { n_heads, seq_length, head_dim, options, .. } = *problem;
    let grad = Values::rows(grad);
    let output = Values::rows(saved.output);
    let grad_heads = Heads { strides: token_strides(seq_length, n_heads, head_dim), pointer: grad.as_ptr().cast_mut() };
    let log_sum_exp = Values::rows(saved.log_sum_exp);
    let (scale, softcap) = (options.scale as f32, options.softcap.map(|cap| cap as f32));

    problem.for_groups(|batch, kv| {
        let (mut tile, mut d_tile) = (Vec::new(), Vec::new());
        for head in problem.heads(kv) {
            for (queries, seen) in problem.tiles(batch) {
                let (rows, columns) = (queries.len(), seen.len());
                let tile = first_of(&mut tile, rows * columns);
                let d_tile = first_of(&mut d_tile, rows * columns);
                // SAFETY: all indices come from the tensors' sizes; no other group writes this head
                // of `dq`, or this key head of `dk` and `dv`.
                unsafe {
                    let query_rows = q.matrix(batch, head, queries.start);
                    let grad_rows = grad_heads.matrix(batch, head, queries.start);
                    let (key_rows, value_rows) = (k.matrix(batch, kv, seen.start), v.matrix(batch, kv, seen.start));
                    let inner = [rows, head_dim, columns];
                    let scores = Matrix::of_mut(tile, columns);
                    product(inner, scores, query_rows, key_rows.transposed(), false);
                    let d_scores = Matrix::of_mut(d_tile, columns);
                    product(inner, d_scores, grad_rows, value_rows.transposed(), false);

                    for (at, query) in queries.clone().enumerate() {
                        let line = (batch * n_heads + head) * seq_length + query;
                        let place = ((batch * seq_length + query) * n_heads + head) * head_dim;
                        let row = &mut tile[at * columns..][..columns];
                        let d_row = &mut d_tile[at * columns..][..columns];
                        problem.drop(batch, head, query, &seen, d_row);
                        let visible = problem.visible(batch, query);
                        if visible.is_empty() {
                            row.fill(0.0);
                            d_row.fill(0.0);
                            continue;
                        }
                        let (from, to) = (visible.start - seen.start, visible.end - seen.start);
                        let sum = log_sum_exp[line];
                        vectorised(
                            #[inline(always)]
                            || {
                                let (grad, output) = (&grad[place..][..head_dim], &output[place..][..head_dim]);
                                let delta = sum_of(grad, output, |a, b| a * b);
                                for outside in [0..from, to..columns] {
                                    row[outside.clone()].fill(0.0);
                                    d_row[outside].fill(0.0);
                                }
                                let row = row[from..to].iter_mut().zip(&mut d_row[from..to]);
                                match softcap {
                                    None => row.for_each(|(p, d)| {
                                        *p = exp(*p * scale - sum);
                                        *d = *p * (*d - delta) * scale;
                                    }),
                                    Some(cap) => row.for_each(|(p, d)| {
                                        let tanh = (*p * scale / cap).tanh();
                                        *p = exp(cap * tanh - sum);
                                        *d = *p * (*d - delta) * scale * (1.0 - tanh * tanh);
                                    }),
                                }
                            },
                        );
                    }
                    let d_scores = Matrix::of(d_tile, columns);
                    let d_query_rows = dq.matrix(batch, head, queries.start);
                    product([rows, columns, head_dim], d_query_rows, d_scores, key_rows, false);
                    let outer = [columns, rows, head_dim];
                    let d_key_rows = dk.matrix(batch, kv, seen.start);
                    product(outer, d_key_rows, d_scores.transposed(), query_rows, true);
                    if options.dropout.is_some() {
                        for (query, row) in queries.clone().zip(tile.chunks_exact_mut(columns.max(1))) {
                            problem.drop(batch, head, query, &seen, row);
                        }
                    }
                    let d_value_rows = dv.matrix(batch, kv, seen.start);
                    product(outer, d_value_rows, Matrix::of(tile, columns).transposed(), grad_rows, true);
                }
            }
        }
    });
}

impl AttentionOptions {
    /// Caps a row of scaled scores.
    #[inline(always)]
    pub(crate) fn cap(&self, scores: &mut [f32]) {
        if let Some(cap) = self.softcap {
            let cap = cap as f32;
            scores.iter_mut().for_each(|score| *score = cap * (*score / cap).tanh());
        }
    }
}

/// The first `size` elements of a growing buffer, with arbitrary content.
fn first_of(buffer: &mut Vec<f32>, size: usize) -> &mut [f32] {
    if buffer.len() < size {
        buffer.resize(size, 0.0);
    }
    &mut buffer[..size]
}

fn token_strides(tokens: usize, heads: usize, head_dim: usize) -> [isize; 4] {
    let token = (heads * head_dim) as isize;
    [token * tokens as isize, head_dim as isize, token, 1]
}
