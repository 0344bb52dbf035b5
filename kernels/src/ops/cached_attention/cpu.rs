//! Cached attention on the CPU.

use std::ops::Range;

use burn::tensor::Tensor;
use burn_ndarray::NdArray;
use rayon::prelude::*;

use super::{CachedAttention, CachedAttentionOps, CachedRow, KvStorage};
use crate::checked::Checked;
use crate::cpu::{Values, Words, clamp_index, exp, integers, max_of, sum_of, tensor, vectorised, words_tensor, zeros};
use crate::ops::attention::AttentionOptions;
use crate::ops::attention::cpu::attention_over;
use crate::ops::rotary::cpu::rotate;
use crate::packed_heads::PackedHeads;
use crate::quant::int8::{PACKED, dequantize_row, quantize_row};

impl CachedAttentionOps for NdArray {
    fn cached_attention(operands: Checked<CachedAttention<'_, Self>>) -> Tensor<Self, 3> {
        cached_attention(operands.into_inner())
    }
}

fn cached_attention(operands: CachedAttention<'_, NdArray>) -> Tensor<NdArray, 3> {
    let CachedAttention { qkv, heads, placement, options, at, cache } = operands;
    let [tokens, width] = qkv.dims();
    let PackedHeads { n_heads, n_kv_heads, head_dim } = heads;
    let positions = integers(at.positions.clone());
    let mut qkv = Values::rows(qkv).into_vec();
    let half = placement.rotary.as_ref().map_or(0, |table| table.cos.dims()[1]);
    let table = placement.rotary.as_ref().map(|table| [&table.cos, &table.sin].map(|x| Values::rows(x.clone())));
    let gammas = [&placement.query_norm, &placement.key_norm]
        .map(|norm| norm.as_ref().map(|norm| (Values::rows(norm.gamma.clone()), norm.epsilon as f32)));
    vectorised(
        #[inline(always)]
        || {
            let mut rotated = vec![0.0; head_dim];
            for (position, row) in positions.iter().zip(qkv.chunks_exact_mut(width)) {
                for (head, x) in row.chunks_exact_mut(head_dim).take(n_heads + n_kv_heads).enumerate() {
                    if let Some((gamma, epsilon)) = &gammas[usize::from(head >= n_heads)] {
                        let square = sum_of(x, x, |x, _| x * x) / head_dim as f32;
                        let inverse = 1.0 / (square + epsilon).sqrt();
                        x.iter_mut().zip(&gamma[..]).for_each(|(x, gamma)| *x *= inverse * gamma);
                    }
                    if let Some([cos, sin]) = &table {
                        let at = clamp_index(*position, cos.len() / half - 1) * half;
                        rotate(x, &mut rotated, &cos[at..][..half], &sin[at..][..half], 1.0);
                        x.copy_from_slice(&rotated);
                    }
                }
            }
        },
    );
    for (first, held) in [(n_heads, &mut cache.keys), (n_heads + n_kv_heads, &mut cache.values)] {
        append(held, &qkv, heads, first, &at.rows);
    }
    let [_, _, page_tokens, _] = cache.dims();
    let [keys, values] = [&cache.keys, &cache.values].map(Stored::of);
    let held = Pages { keys: &keys, values: &values, page_tokens, n_kv_heads, head_dim };
    let sinks = placement.sinks.map(Values::rows);
    let seen = Seen { window: at.window, options, sinks: sinks.as_deref() };
    let output = attend(&qkv, heads, held, &at.rows, seen);
    tensor(output, [tokens, n_heads, head_dim])
}

/// Writes the heads from `first` on of each token in `qkv` to the pages of its row.
fn append(held: &mut KvStorage<NdArray>, qkv: &[f32], heads: PackedHeads, first: usize, rows: &[CachedRow]) {
    let PackedHeads { n_kv_heads, head_dim, .. } = heads;
    let dims = held.dims();
    let page_tokens = dims[2];
    // Destination of each head of a token, in heads, and its values.
    let places = rows.iter().flat_map(|row| (row.keys - row.tokens..row.keys).map(move |place| (row, place)));
    let heads = places.zip(qkv.chunks_exact(heads.width())).flat_map(|((CachedRow { pages, .. }, place), token)| {
        let page = pages[place / page_tokens] as usize;
        (0..n_kv_heads).map(move |head| {
            let line = (page * n_kv_heads + head) * page_tokens + place % page_tokens;
            (line, &token[(first + head) * head_dim..][..head_dim])
        })
    });
    match held {
        KvStorage::Float(floats) => floats.inplace(|floats| {
            let mut values = Values::rows(floats).into_vec();
            heads.for_each(|(line, head)| values[line * head_dim..][..head_dim].copy_from_slice(head));
            tensor(values, dims)
        }),
        KvStorage::Int8 { packed, scales } => {
            let (words_each, shapes) = (head_dim / PACKED, (packed.dims(), scales.dims()));
            packed.inplace(|packed| {
                let mut words = Words::of(packed).into_vec();
                scales.inplace(|scales| {
                    let mut scales = Values::rows(scales).into_vec();
                    heads.for_each(|(line, head)| {
                        scales[line] = quantize_row(head, &mut words[line * words_each..][..words_each]);
                    });
                    tensor(scales, shapes.1)
                });
                words_tensor(words, shapes.0)
            });
        }
    }
}

/// A cache's keys, or values, on the host.
enum Stored {
    Float(Values),
    Int8 { words: Words, scales: Values },
}

impl Stored {
    fn of(held: &KvStorage<NdArray>) -> Self {
        match held {
            KvStorage::Float(floats) => Self::Float(Values::rows(floats.clone())),
            KvStorage::Int8 { packed, scales } => {
                Self::Int8 { words: Words::of(packed.clone()), scales: Values::rows(scales.clone()) }
            }
        }
    }
}

/// A cache's keys and values, `[pages, n_kv_heads, page_tokens, head_dim]` each.
#[derive(Clone, Copy)]
struct Pages<'a> {
    keys: &'a Stored,
    values: &'a Stored,
    page_tokens: usize,
    n_kv_heads: usize,
    head_dim: usize,
}

impl Pages<'_> {
    /// Calls `work` with the elements of lines `range` of a head in a page.
    #[inline(always)]
    fn lines(&self, of: &Stored, page: u32, head: usize, range: Range<usize>, mut work: impl FnMut(usize, &[f32])) {
        let first = (page as usize * self.n_kv_heads + head) * self.page_tokens;
        let width = self.head_dim;
        match of {
            Stored::Float(values) => {
                let page = &values[first * width..][..self.page_tokens * width];
                range.for_each(|line| work(line, &page[line * width..][..width]));
            }
            Stored::Int8 { words, scales } => {
                let mut spread_line = vec![0.0; width];
                let words_each = width / PACKED;
                range.for_each(|line| {
                    let at = first + line;
                    dequantize_row(&words[at * words_each..][..words_each], scales[at], &mut spread_line);
                    work(line, &spread_line);
                });
            }
        }
    }

    /// Calls `work` with each of a row's keys or values from `first` on, counted from there.
    #[inline(always)]
    fn each(&self, of: &Stored, row: &CachedRow, head: usize, first: usize, mut work: impl FnMut(usize, &[f32])) {
        let page_tokens = self.page_tokens;
        let used = row.keys.div_ceil(page_tokens);
        for (at, page) in row.pages[..used].iter().enumerate().skip(first / page_tokens) {
            let begin = at * page_tokens;
            let lines = first.saturating_sub(begin)..page_tokens.min(row.keys - begin);
            self.lines(of, *page, head, lines, |line, head| work(begin + line - first, head));
        }
    }

    /// The keys or values of a row, concatenated: `[n_kv_heads, used pages * page_tokens,
    /// head_dim]`.
    fn side_by_side(&self, of: &Stored, row: &CachedRow) -> Vec<f32> {
        let used = &row.pages[..row.keys.div_ceil(self.page_tokens)];
        let mut all = Vec::with_capacity(self.n_kv_heads * used.len() * self.page_tokens * self.head_dim);
        for head in 0..self.n_kv_heads {
            for page in used {
                self.lines(of, *page, head, 0..self.page_tokens, |_, line| all.extend_from_slice(line));
            }
        }
        all
    }
}

/// What limits and scales scores, and the sinks of all heads.
#[derive(Clone, Copy)]
struct Seen<'a> {
    window: Option<usize>,
    options: AttentionOptions,
    sinks: Option<&'a [f32]>,
}

/// Attention of packed queries `[tokens, width]`, concatenated by row, each over the keys of its
/// row: `[tokens, n_heads, head_dim]`.
fn attend(qkv: &[f32], heads: PackedHeads, held: Pages<'_>, rows: &[CachedRow], seen: Seen<'_>) -> Vec<f32> {
    let PackedHeads { n_heads, n_kv_heads, head_dim } = heads;
    let mut output = zeros(qkv.len() / heads.width() * n_heads * head_dim);
    let (mut qkv, mut out) = (qkv, &mut output[..]);
    // Query heads that share a key head, of rows with one new token.
    let mut groups = Vec::new();
    let group = n_heads / n_kv_heads * head_dim;
    for row in rows {
        let (own, behind) = qkv.split_at(row.tokens * heads.width());
        let (own_out, out_behind) = std::mem::take(&mut out).split_at_mut(row.tokens * n_heads * head_dim);
        (qkv, out) = (behind, out_behind);
        if row.tokens == 1 {
            let heads = own.chunks_exact(group).zip(own_out.chunks_exact_mut(group)).enumerate();
            groups.extend(heads.map(|(head, (query, out))| (row, head, query, out)));
        } else {
            let side_by_side = [held.keys, held.values].map(|of| held.side_by_side(of, row));
            let limits = (seen.window, seen.options, seen.sinks);
            attention_over(own, heads, side_by_side.each_ref().map(Vec::as_slice), row.keys, limits, own_out);
        }
    }
    groups.into_par_iter().for_each(|(row, head, query, out)| {
        vectorised(
            #[inline(always)]
            || attend_one(query, held, row, head, seen, out),
        );
    });
    output
}

/// Attention of one token's query heads `query`, which share the key head `head`, over all keys of
/// its row: into `out`. Copies nothing, and sums do not depend on page boundaries.
#[inline(always)]
fn attend_one(
    query: &[f32],
    held: Pages<'_>,
    row: &CachedRow,
    head: usize,
    Seen { window, options, sinks }: Seen<'_>,
    out: &mut [f32],
) {
    let head_dim = held.head_dim;
    let group = query.len() / head_dim;
    let scale = options.scale as f32;
    let first = window.map_or(0, |window| row.keys.saturating_sub(window));
    let seen = row.keys - first;
    let mut scores = vec![0.0; group * seen];
    held.each(held.keys, row, head, first, |place, key| {
        for (query, scores) in query.chunks_exact(head_dim).zip(scores.chunks_exact_mut(seen)) {
            scores[place] = scale * sum_of(query, key, |a, b| a * b);
        }
    });
    for (at, scores) in scores.chunks_exact_mut(seen).enumerate() {
        options.cap(scores);
        let sink = sinks.map(|sinks| sinks[head * group + at]);
        let max = sink.map_or(max_of(scores), |sink| max_of(scores).max(sink));
        scores.iter_mut().for_each(|score| *score = exp(*score - max));
        let of_sink = sink.map_or(0.0, |sink| (sink - max).exp());
        let inverse = 1.0 / (sum_of(scores, scores, |x, _| x) + of_sink);
        scores.iter_mut().for_each(|score| *score *= inverse);
    }
    out.fill(0.0);
    held.each(held.values, row, head, first, |place, value| {
        for (out, scores) in out.chunks_exact_mut(head_dim).zip(scores.chunks_exact(seen)) {
            let share = scores[place];
            out.iter_mut().zip(value).for_each(|(out, value)| *out += share * value);
        }
    });
}
