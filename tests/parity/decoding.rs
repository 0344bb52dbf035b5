//! The operations of decoding against the reference: skinny products, a cache, sampling.

use burn::tensor::{DType, FloatDType, Int, Tensor, TensorData};
use fireclay_kernels::operands::{Checked, Logits};
use fireclay_kernels::{
    Activation, ActivationKind, Backend, CacheDType, CachedRow, CachedTokens, Int8Weight, LayerCache, Norm,
    PackedHeads, Penalties, Placement, RotaryTable, SampledRow, SampledRows, Sampling, TokenCounts, Weight,
    cached_attention, download_float, download_int, embed, embed_add, head_sample, linear, linear_add, next_positions,
    norm_gate_up, norm_linear,
};

use crate::backend_test;
use crate::compare::{assert_close, random, tolerance, values};
use crate::plain;

fn integers<B: Backend, const D: usize>(data: Vec<i32>, shape: [usize; D], device: &B::Device) -> Tensor<B, D, Int> {
    Tensor::from_data(TensorData::new(data, shape), device)
}

/// The dtypes that weights and activations may have on the device, and how close results in them must be.
fn dtypes<B: Backend>(device: &B::Device) -> Vec<(FloatDType, f64)> {
    let halves = [(FloatDType::BF16, 2e-2), (FloatDType::F16, 4e-3)];
    let has = |dtype: FloatDType| B::name(device).contains("cuda") && B::supports_dtype(device, DType::from(dtype));
    let halves = halves.into_iter().filter(|(dtype, _)| has(*dtype));
    std::iter::once((FloatDType::F32, tolerance::<B>(device))).chain(halves).collect()
}

backend_test!(skinny_projections_match_the_reference::<B>(device) {
    for (dtype, tolerance) in dtypes::<B>(&device) {
        for shape in
            [[1, 1, 2], [1, 64, 130], [2, 3, 4], [3, 264, 66], [8, 1000, 62], [17, 520, 34], [32, 96, 128], [33, 64, 64],
            [2, 72, 6150], [20, 72, 6144]]
        {
            projections_match_the_reference::<B>(shape, dtype, tolerance, &device);
        }
    }
});

// Tiles of rows and columns that are not whole, K that is cut among blocks, its end within a stage, more tiles than blocks, and many rows of few
// outputs. In f32 these last are Burn's product, which a GPU in software computes for minutes.
backend_test!(projections_of_few_rows_match_the_reference::<B>(device) {
    for (dtype, tolerance) in dtypes::<B>(&device) {
        let few = [[9, 1032, 400], [17, 520, 808], [33, 1000, 1344], [64, 264, 1208], [100, 2048, 136], [129, 1288, 400], [12, 72, 34_000]];
        let burns = dtype == FloatDType::F32 && !B::is_synchronous();
        let many: &[_] = if burns { &[] } else { &[[500, 520, 1000], [1000, 1344, 1016]] };
        for shape in few.into_iter().chain(many.iter().copied()) {
            projections_match_the_reference::<B>(shape, dtype, tolerance, &device);
        }
    }
});

// Of f16, numbers times gamma are not finite before the norm divides them.
backend_test!(a_norm_before_a_product_holds_large_numbers::<B>(device) {
    for (dtype, tolerance) in dtypes::<B>(&device) {
        for rows in [3, 12, 70] {
            let x = (random::<B, 2>(1, [rows, 1024], &device) * 3000.0).cast(dtype);
            let weight = random::<B, 2>(2, [512, 1024], &device).cast(dtype);
            let norm = Norm::rms(random::<B, 1>(3, [1024], &device) * 5.0 + 35.0, 1e-6);
            let ours = norm_linear(x.clone(), Some(&norm), weight.clone(), None).cast(DType::F32);
            let wanted = plain::linear(plain::norm(x.cast(DType::F32), &norm), weight.cast(DType::F32), None);
            assert_close(&format!("{rows} rows, {dtype:?}"), &ours, &wanted, tolerance);
        }
    }
});

fn projections_match_the_reference<B: Backend>(
    [rows, d_input, d_output]: [usize; 3],
    dtype: FloatDType,
    tolerance: f64,
    device: &B::Device,
) {
    let x = random::<B, 2>(1, [rows, d_input], device).cast(dtype);
    let weight = random::<B, 2>(2, [d_output, d_input], device).cast(dtype);
    let bias = random::<B, 1>(3, [d_output], device).cast(dtype);
    let residual = random::<B, 2>(4, [rows, d_output], device).cast(dtype);
    let gamma = random::<B, 1>(5, [d_input], device) + 1.5;
    let norms = [
        None,
        Some(Norm::rms(gamma.clone(), 1e-6)),
        Some(Norm::layer(gamma.clone(), Some(random::<B, 1>(6, [d_input], device)), 1e-5)),
    ];
    // The reference computes in f32, from the same values.
    let wide = |x: &Tensor<B, 2>| x.clone().cast(DType::F32);
    for norm in norms {
        for bias in [None, Some(bias.clone())] {
            let what = format!(
                "{rows}x{d_input}x{d_output} {dtype:?}, norm {:?}, bias {}",
                norm.as_ref().map(|norm| norm.kind),
                bias.is_some()
            );
            let input = match &norm {
                Some(norm) => plain::norm(wide(&x), norm),
                None => wide(&x),
            };
            let wide_bias = bias.clone().map(|bias| bias.cast(DType::F32));
            let product = plain::linear(input, wide(&weight), wide_bias);
            let ours = norm_linear(x.clone(), norm.as_ref(), weight.clone(), bias.clone());
            assert_eq!(ours.dtype(), DType::from(dtype), "{what}");
            assert_close(&format!("norm_linear {what}"), &ours.cast(DType::F32), &product, tolerance);
            if norm.is_none() {
                let ours = linear(x.clone(), weight.clone(), bias.clone()).cast(DType::F32);
                assert_close(&format!("linear {what}"), &ours, &product, tolerance);
                let ours = linear_add(x.clone(), weight.clone(), bias.clone(), None, residual.clone());
                let wanted = product.clone() + wide(&residual);
                assert_close(&format!("linear_add {what}"), &ours.cast(DType::F32), &wanted, tolerance);
            }
            for activation in [Activation::plain(ActivationKind::GeluTanh), Activation::gated(ActivationKind::Silu)] {
                let ours = norm_gate_up(x.clone(), norm.as_ref(), weight.clone(), bias.clone(), activation);
                let wanted = plain::activate(product.clone(), activation);
                let what = format!("norm_gate_up {what}, {activation:?}");
                assert_close(&what, &ours.cast(DType::F32), &wanted, tolerance);
            }
        }
    }
}

backend_test!(results_in_scratch_buffers_stay_as_they_are_while_they_are_held::<B>(device) {
    let weight = random::<B, 2>(1, [66, 64], &device);
    let input = |seed: u64| random::<B, 2>(seed, [3, 64], &device);
    // More at a time than there are buffers that are used again; then some of those, and the others go on.
    let mut held: Vec<(u64, Tensor<B, 2>)> = Vec::new();
    for round in 0..3 {
        held.retain(|(seed, _)| seed % 3 == 0);
        held.extend((0..12).map(|at| 2 + 12 * round + at).map(|seed| (seed, linear(input(seed), weight.clone(), None))));
        for (seed, result) in &held {
            let wanted = plain::linear(input(*seed), weight.clone(), None);
            assert_close(&format!("input {seed} in round {round}"), result, &wanted, tolerance::<B>(&device));
        }
    }
});

backend_test!(projections_to_very_many_outputs_match_the_reference::<B>(device) {
    for (dtype, tolerance) in dtypes::<B>(&device) {
        for [rows, d_input, d_output] in [[17, 72, 17_000], [9, 2560, 9001], [32, 1000, 17_001], [3, 1024, 16_400], [20, 264, 34_000]] {
            let what = format!("{rows}x{d_input}x{d_output} {dtype:?}");
            let x = random::<B, 2>(1, [rows, d_input], &device).cast(dtype);
            let weight = random::<B, 2>(2, [d_output, d_input], &device);
            let values: Vec<f32> = weight.clone().into_data().iter::<f32>().collect();
            let bytes = Int8Weight::<B>::quantize(&values, [d_output, d_input], &device);
            let bytes = Weight::Int8(bytes.expect("the device works").expect("rows of multiples of four"));
            for weight in [Weight::from(weight.cast(dtype)), bytes] {
                let wide = weight.clone().into_float(FloatDType::F32).cast(DType::F32);
                let wanted = plain::linear(x.clone().cast(DType::F32), wide, None);
                assert_close(&what, &linear(x.clone(), weight, None).cast(DType::F32), &wanted, tolerance);
            }
        }
    }
});

backend_test!(logits_of_many_rows_are_wide_whatever_the_weight::<B>(device) {
    for (dtype, tolerance) in dtypes::<B>(&device) {
        for [rows, d_input, d_output] in [[256, 640, 2048], [300, 384, 1500], [40, 24, 60]] {
            let hidden = random::<B, 2>(1, [rows, d_input], &device).cast(dtype);
            let weight = random::<B, 2>(2, [d_output, d_input], &device);
            // What a cast or a narrowing leaves has gaps between its rows.
            let narrowed = random::<B, 2>(3, [d_output, d_input + 8], &device).cast(dtype).narrow(1, 0, d_input);
            for weight in [weight.clone(), weight.cast(dtype), narrowed] {
                let what = format!("{rows}x{d_input}x{d_output} {dtype:?} by {:?}", weight.dtype());
                let rounded = weight.clone().cast(dtype).cast(DType::F32);
                let wanted = plain::linear(hidden.clone().cast(DType::F32), rounded, None);
                let ours = B::logits(Checked::new(Logits { hidden: hidden.clone(), weight: weight.into() }));
                assert_eq!(ours.dtype(), DType::F32, "{what}");
                assert_close(&what, &ours, &wanted, tolerance);
            }
        }
    }
});

backend_test!(weights_of_bytes_are_the_numbers_that_they_stand_for::<B>(device) {
    for (dtype, tolerance) in dtypes::<B>(&device) {
        for [rows, d_input, d_output] in [[1, 4, 2], [1, 64, 130], [3, 36, 66], [8, 1000, 62], [32, 96, 128], [40, 64, 64]] {
            let values: Vec<f32> = random::<B, 2>(2, [d_output, d_input], &device).into_data().iter::<f32>().collect();
            let bytes = Int8Weight::<B>::quantize(&values, [d_output, d_input], &device);
            let bytes = bytes.expect("the device works").expect("rows of multiples of four");
            let wide = plain::int8_to_float(&bytes, FloatDType::F32);
            let what = format!("{rows}x{d_input}x{d_output} {dtype:?}");
            // No byte is off by more than half a step.
            let given = Tensor::<B, 2>::from_data(TensorData::new(values, [d_output, d_input]), &device);
            let steps = (wide.clone() - given) / bytes.scales.clone().reshape([d_output, 1]);
            let furthest = steps.abs().max().into_data().iter::<f32>().next().expect("a value");
            assert!((0.1..0.51).contains(&furthest), "{what}: {furthest} of a step");
            assert_close(&what, &Weight::Int8(bytes.clone()).into_float(FloatDType::F32), &wide, 1e-6);

            let x = random::<B, 2>(1, [rows, d_input], &device).cast(dtype);
            let x_wide = x.clone().cast(DType::F32);
            let weight = || Weight::Int8(bytes.clone());
            let product = plain::linear(x_wide.clone(), wide.clone(), None);
            assert_close(&what, &linear(x.clone(), weight(), None).cast(DType::F32), &product, tolerance);
            let residual = random::<B, 2>(4, [rows, d_output], &device).cast(dtype);
            let ours = linear_add(x.clone(), weight(), None, None, residual.clone()).cast(DType::F32);
            assert_close(&what, &ours, &(product + residual.cast(DType::F32)), tolerance);
            let norm = Norm::rms(random::<B, 1>(5, [d_input], &device) + 1.5, 1e-6);
            let normed = plain::norm(x_wide, &norm);
            let product = plain::linear(normed, wide.clone(), None);
            let ours = norm_linear(x.clone(), Some(&norm), weight(), None).cast(DType::F32);
            assert_close(&what, &ours, &product, tolerance);
            let swiglu = Activation::gated(ActivationKind::Silu);
            let ours = norm_gate_up(x, Some(&norm), weight(), None, swiglu).cast(DType::F32);
            assert_close(&what, &ours, &plain::activate(product, swiglu), tolerance);

            let tokens = integers::<B, 2>(vec![1, 0, d_output as i32 - 1], [1, 3], &device);
            let ours = embed(weight(), tokens.clone(), dtype).cast(DType::F32);
            assert_close(&what, &ours, &embed(wide, tokens, FloatDType::F32), tolerance);
        }
    }
    let bytes = Int8Weight::<B>::quantize(&[1.0; 6], [2, 3], &device).expect("the device works");
    assert!(bytes.is_none(), "rows are multiples of four");
});

/// Rows of a cache that grow, in pages that lie anywhere.
struct Growing {
    page_tokens: usize,
    lengths: Vec<usize>,
    pages: Vec<Vec<u32>>,
    /// Pages that none has yet, in no order.
    left: Vec<u32>,
}

impl Growing {
    fn new(rows: usize, page_tokens: usize, pages: usize) -> Self {
        let left = (0..pages).map(|page| (page * 7 % pages) as u32).collect();
        assert!(!pages.is_multiple_of(7), "every page once");
        Self { page_tokens, lengths: vec![0; rows], pages: vec![Vec::new(); rows], left }
    }

    /// The rows `which` with so many more tokens each.
    fn grown(&mut self, which: &[(usize, usize)]) -> Vec<CachedRow> {
        let grown = which.iter().map(|(row, tokens)| {
            self.lengths[*row] += tokens;
            while self.pages[*row].len() * self.page_tokens < self.lengths[*row] {
                self.pages[*row].push(self.left.pop().expect("a page"));
            }
            CachedRow { pages: self.pages[*row].as_slice().into(), tokens: *tokens, keys: self.lengths[*row] }
        });
        grown.collect()
    }
}

backend_test!(cached_attention_matches_the_reference_step_by_step::<B>(device) {
    let shapes = [
        (PackedHeads { n_heads: 1, n_kv_heads: 1, head_dim: 2 }, 1),
        (PackedHeads { n_heads: 4, n_kv_heads: 2, head_dim: 10 }, 2),
        (PackedHeads { n_heads: 10, n_kv_heads: 1, head_dim: 24 }, 3),
        (PackedHeads { n_heads: 4, n_kv_heads: 2, head_dim: 128 }, 1),
        // So many rows that heads of a group are attended with together.
        (PackedHeads { n_heads: 8, n_kv_heads: 2, head_dim: 16 }, 80),
    ];
    for (dtype, tolerance) in dtypes::<B>(&device) {
        for (heads, batch_size) in shapes {
            let head_dim = heads.head_dim;
            // Rounding weighs more where a score is the sum of two products.
            let tolerance = if head_dim == 2 { 3.0 * tolerance } else { tolerance };
            let frequencies: Vec<f64> = (0..head_dim / 2).map(|at| 0.7f64.powi(at as i32)).collect();
            let gamma = |seed| Norm::rms(random::<B, 1>(seed, [head_dim], &device) + 1.5, 1e-6);
            let bare = Placement { query_norm: None, key_norm: None, rotary: None };
            let full = Placement {
                query_norm: Some(gamma(1)),
                key_norm: Some(gamma(2)),
                rotary: Some(RotaryTable::new(700, &frequencies, 1.0, &device)),
            };
            // Rows that begin together, rows that do not, and more keys than one piece holds; pages of few and many tokens.
            for (placement, window, starts, page_tokens) in [
                (&bare, None, [6, 6, 6], 32),
                (&full, None, [3, 1, 5], 1),
                (&full, Some(4), [2, 7, 1], 8),
                (&full, None, [570, 300, 1], 64),
                (&bare, Some(300), [570, 560, 570], 1024),
            ] {
                if batch_size > starts.len() && starts[0] > 20 {
                    continue;
                }
                let pages = (0..3).map(|at| (starts[at] + 12usize).div_ceil(page_tokens)).max().expect("rows") * batch_size;
                let pages = if pages.is_multiple_of(7) { pages + 1 } else { pages };
                let mut cases = vec![(CacheDType::Float(dtype), CacheDType::Float(FloatDType::F32), tolerance)];
                // Elsewhere than on the CPU each case is compiled for.
                let some = B::is_synchronous() || [1, 64].contains(&page_tokens);
                if some && head_dim.is_multiple_of(CacheDType::INT8_COLUMNS) {
                    // Where a number lies between two bytes, rounding may take either; and bytes are near to the floats.
                    cases.push((CacheDType::Int8, CacheDType::Int8, tolerance.max(3e-3)));
                    cases.push((CacheDType::Int8, CacheDType::Float(FloatDType::F32), tolerance.max(3e-2)));
                }
                for (own, other, tolerance) in cases {
                    let mut ours = LayerCache::<B>::new(pages, page_tokens, heads, own, &device);
                    let mut theirs = LayerCache::<B>::new(pages, page_tokens, heads, other, &device);
                    let mut rows = Growing::new(batch_size, page_tokens, pages);
                    // What stands before, in one go; one more token each; then some read several and others one; then one each.
                    let all = |tokens: &dyn Fn(usize) -> usize| {
                        (0..batch_size).map(|row| (row, tokens(row))).collect::<Vec<_>>()
                    };
                    let steps = [
                        all(&|row| starts[row % starts.len()]),
                        all(&|_| 1),
                        all(&|row| if row == 1 { 5 } else { 1 }),
                        all(&|_| 1),
                        all(&|_| 1)[batch_size / 2..].to_vec(),
                    ];
                    let mut last: Option<(_, CachedTokens<B>)> = None;
                    for (step, which) in steps.into_iter().enumerate() {
                        let grown = rows.grown(&which);
                        let tokens: usize = which.iter().map(|(_, tokens)| tokens).sum();
                        let at = match &last {
                            Some((same, at)) if *same == which && tokens == which.len() => at.next(grown),
                            _ => CachedTokens::new(grown, window, &device),
                        };
                        let qkv = random::<B, 2>(20 + step as u64, [tokens, heads.width()], &device).cast(dtype);
                        let a = cached_attention(qkv.clone(), heads, placement.clone(), &at, &mut ours).cast(DType::F32);
                        let b = plain::cached_attention(qkv.cast(DType::F32), heads, placement.clone(), &at, &mut theirs);
                        let b = b.reshape([tokens, heads.n_heads * head_dim]);
                        let what = format!(
                            "{heads:?} {dtype:?}, {own:?} beside {other:?}, window {window:?} starts {starts:?}, step {step}"
                        );
                        assert_close(&what, &a, &b, tolerance);
                        last = Some((which, at));
                    }
                }
            }
        }
    }
});

backend_test!(rows_of_several_new_tokens_are_read_together::<B>(device) {
    let shapes = [
        PackedHeads { n_heads: 4, n_kv_heads: 2, head_dim: 128 },
        PackedHeads { n_heads: 6, n_kv_heads: 2, head_dim: 64 },
        PackedHeads { n_heads: 3, n_kv_heads: 3, head_dim: 64 },
        PackedHeads { n_heads: 1, n_kv_heads: 1, head_dim: 128 },
    ];
    // Short rows and long ones, whole tiles and parts; chunks behind what is there, beside rows of one token; and at last few tokens.
    let steps: [&[(usize, usize)]; 4] = [
        &[(0, 130), (1, 2), (2, 64), (3, 257), (4, 1), (5, 37), (6, 128)],
        &[(1, 1), (2, 1), (0, 61), (3, 129), (4, 3), (5, 1), (6, 200)],
        &[(4, 300), (6, 1), (0, 1), (1, 65)],
        &[(3, 5), (5, 2), (1, 7)],
    ];
    for (dtype, tolerance) in dtypes::<B>(&device) {
        for heads in shapes {
            let head_dim = heads.head_dim;
            let frequencies: Vec<f64> = (0..head_dim / 2).map(|at| 0.7f64.powi(at as i32)).collect();
            let placement = Placement {
                query_norm: Some(Norm::rms(random::<B, 1>(1, [head_dim], &device) + 1.5, 1e-6)),
                key_norm: Some(Norm::rms(random::<B, 1>(2, [head_dim], &device) + 1.5, 1e-6)),
                rotary: Some(RotaryTable::new(700, &frequencies, 1.0, &device)),
            };
            for window in [None, Some(1), Some(100)] {
                let page_tokens = 64;
                let pages = 33;
                let mut ours = LayerCache::<B>::new(pages, page_tokens, heads, CacheDType::Float(dtype), &device);
                let mut theirs =
                    LayerCache::<B>::new(pages, page_tokens, heads, CacheDType::Float(FloatDType::F32), &device);
                // What another text has left in every page is no number, whatever is there of a row's own.
                for page in 0..pages as u32 {
                    let row = CachedRow { pages: [page].into(), tokens: page_tokens, keys: page_tokens };
                    let at = CachedTokens::new(vec![row], None, &device);
                    let nothing = || Tensor::<B, 2>::full([page_tokens, heads.width()], f32::NAN, &device);
                    let bare = Placement { query_norm: None, key_norm: None, rotary: None };
                    cached_attention(nothing().cast(dtype), heads, bare.clone(), &at, &mut ours);
                    plain::cached_attention(nothing(), heads, bare, &at, &mut theirs);
                }
                let mut rows = Growing::new(7, page_tokens, pages);
                for (step, which) in steps.iter().enumerate() {
                    let at = CachedTokens::new(rows.grown(which), window, &device);
                    let tokens: usize = which.iter().map(|(_, tokens)| tokens).sum();
                    let qkv = random::<B, 2>(20 + step as u64, [tokens, heads.width()], &device).cast(dtype);
                    let a = cached_attention(qkv.clone(), heads, placement.clone(), &at, &mut ours).cast(DType::F32);
                    let b = plain::cached_attention(qkv.cast(DType::F32), heads, placement.clone(), &at, &mut theirs);
                    let b = b.reshape([tokens, heads.n_heads * head_dim]);
                    // Each row by itself: a small one would be lost among the others.
                    let mut first = 0;
                    for (row, tokens) in *which {
                        let of_row = |x: &Tensor<B, 2>| x.clone().narrow(0, first, *tokens);
                        let what = format!("{heads:?} {dtype:?}, window {window:?}, step {step}, row {row}");
                        assert_close(&what, &of_row(&a), &of_row(&b), tolerance);
                        first += tokens;
                    }
                }
            }
        }
    }
});

backend_test!(cached_attention_gives_the_same_bits_whatever_the_pages::<B>(device) {
    let heads = PackedHeads { n_heads: 4, n_kv_heads: 2, head_dim: 16 };
    let bare = || Placement { query_norm: None, key_norm: None, rotary: None };
    for dtype in [CacheDType::Float(FloatDType::F32), CacheDType::Int8] {
        let outputs = [(1024, 3), (64, 27), (16, 101)].map(|(page_tokens, pages)| {
            let mut cache = LayerCache::<B>::new(pages, page_tokens, heads, dtype, &device);
            let mut rows = Growing::new(2, page_tokens, pages);
            let steps = [[(0, 300), (1, 700)], [(0, 1), (1, 1)], [(0, 30), (1, 1)], [(0, 1), (1, 1)]];
            steps.map(|which| {
                let tokens = which.iter().map(|(_, tokens)| tokens).sum();
                let at = CachedTokens::new(rows.grown(&which), None, &device);
                let qkv = random::<B, 2>(tokens as u64, [tokens, heads.width()], &device);
                let output = cached_attention(qkv, heads, bare(), &at, &mut cache);
                output.into_data().iter::<f32>().map(f32::to_bits).collect::<Vec<u32>>()
            })
        });
        assert!(outputs[0] == outputs[1] && outputs[1] == outputs[2], "{dtype:?}");
    }
});

backend_test!(what_is_no_number_stays_in_its_row_and_is_not_lost::<B>(device) {
    let heads = PackedHeads { n_heads: 4, n_kv_heads: 2, head_dim: 16 };
    let bare = || Placement { query_norm: None, key_norm: None, rotary: None };
    for dtype in [CacheDType::Float(FloatDType::F32), CacheDType::Int8] {
        let mut cache = LayerCache::<B>::new(3, 64, heads, dtype, &device);
        let mut pass = |rows: &[(&[u32], usize, usize)], bad: Option<usize>| {
            let rows: Vec<CachedRow> =
                rows.iter().map(|(pages, tokens, keys)| CachedRow { pages: (*pages).into(), tokens: *tokens, keys: *keys }).collect();
            let tokens = rows.iter().map(|row| row.tokens).sum::<usize>();
            let mut qkv = values(&random::<B, 2>(tokens as u64, [tokens, heads.width()], &device));
            if let Some(bad) = bad {
                qkv[bad * heads.width()..][..heads.width()].fill(f32::NAN);
            }
            let qkv = Tensor::from_data(TensorData::new(qkv, [tokens, heads.width()]), &device);
            let output = values(&cached_attention(qkv, heads, bare(), &CachedTokens::new(rows, None, &device), &mut cache));
            output.chunks_exact(64).map(|row| row.iter().all(|value| value.is_finite())).collect::<Vec<bool>>()
        };
        // The third of five tokens; those behind it see it, and so does the next token that is decoded.
        assert_eq!(pass(&[(&[0], 5, 5)], Some(2))[2..], [false; 3], "{dtype:?}");
        assert_eq!(pass(&[(&[0], 1, 6)], None), [false], "{dtype:?}");
        // Another row takes its page, beside a longer one, so that more is read than it has.
        assert_eq!(pass(&[(&[0], 2, 2), (&[1, 2], 90, 90)], None), [true; 92], "{dtype:?}");
        assert_eq!(pass(&[(&[0], 1, 3), (&[1, 2], 1, 91)], None), [true; 2], "{dtype:?}");
    }
});

// What stands in their memory afterwards, or is computed before they are waited for, is none of theirs.
backend_test!(downloads_are_what_tensors_were_when_they_began::<B>(device) {
    let mut begun = Vec::new();
    for round in 0..40 {
        let whole: Vec<i32> = (0..33).map(|at| 100 * round + at).collect();
        let ints = integers::<B, 1>(whole.clone(), [33], &device).mul_scalar(3);
        let floats = random::<B, 2>(round as u64, [5, 7], &device).transpose();
        let wanted = values(&floats);
        begun.push((download_int(ints), download_float(floats), whole, wanted));
        let others = random::<B, 2>(7, [5, 7], &device) + 1.0;
        drop(others);
    }
    for (ints, floats, whole, wanted) in begun {
        let ints: Vec<i64> = ints.wait().expect("the device works").iter().collect();
        assert_eq!(ints, whole.iter().map(|value| 3 * i64::from(*value)).collect::<Vec<_>>());
        let floats = floats.wait().expect("the device works");
        assert_eq!(floats.shape.to_vec(), [7, 5]);
        assert_eq!(floats.iter::<f32>().collect::<Vec<_>>(), wanted);
    }
});

backend_test!(embed_add_and_next_positions_are_what_they_say::<B>(device) {
    let table = random::<B, 2>(1, [7, 12], &device);
    let tokens = integers::<B, 2>(vec![3, 0, 6, 6], [2, 2], &device);
    let x = random::<B, 3>(2, [2, 2, 12], &device);
    let sum = embed_add(table.clone(), tokens.clone(), x.clone());
    assert_close("embed_add", &sum, &(x + embed(table, tokens.clone(), FloatDType::F32)), 1e-6);
    let next: Vec<i64> = next_positions(tokens, 5).into_data().iter::<i64>().collect();
    assert_eq!(next, [4, 1, 5, 5]);
});

// Few of a token and many, in vocabularies that are no whole words of four, in a line that had others before.
backend_test!(token_counts_are_how_often_each_stands_in_a_text::<B>(device) {
    for (vocabulary, most) in [(6, 2), (103, 255), (64, 300), (33, 1)] {
        let mut counts = TokenCounts::<B>::new(3, vocabulary, &device);
        let text = |seed: usize| -> Vec<u32> {
            let mut text: Vec<u32> = (0..most).map(|_| (seed % vocabulary) as u32).collect();
            text.extend((0..vocabulary).step_by(seed).map(|token| token as u32).filter(|token| *token as usize != seed % vocabulary));
            text
        };
        let texts = [text(2), text(5), vec![]];
        for line in [0, 2, 1] {
            counts.begin(line, &text(3), &text(4), &[(1, 1.0)]);
            counts.begin(line, &texts[line], &texts[(line + 1) % 3], &[]);
        }
        let wanted = |text: &[u32]| -> Vec<f32> {
            let mut counts = vec![0.0; vocabulary];
            text.iter().for_each(|token| counts[*token as usize] += 1.0);
            counts
        };
        let all = |shift: usize| (0..3).flat_map(|line| wanted(&texts[(line + shift) % 3])).collect::<Vec<f32>>();
        assert_eq!(values(&counts.prompt), all(0), "{vocabulary}, prompts");
        assert_eq!(values(&counts.written), all(1), "{vocabulary}, behind them");
        assert_eq!(values(&counts.bias), vec![0.0; 3 * vocabulary], "{vocabulary}, biases");
    }
});

backend_test!(draws_are_those_of_the_reference::<B>(device) {
    // Narrow and wide vocabularies, flat and peaked ones, and cuts that few or many tokens lie above.
    for (vocabulary, spread) in [(6, 2.0), (300, 1.0), (5003, 6.0), (5003, 0.1), (20_011, 3.0)] {
        let plain = Sampling::greedy().with_temperature(0.9);
        let penalties = Penalties { repetition: 1.3, presence: 0.2, frequency: 0.1 };
        let cases = [
            (Sampling::greedy(), false),
            (plain, false),
            (plain.with_top_k(Some(1)), false),
            (plain.with_top_k(Some(50)), false),
            (plain.with_top_k(Some(4000)), false),
            (plain.with_top_p(Some(0.9)), false),
            (plain.with_top_p(Some(0.01)), false),
            (plain.with_top_k(Some(50)).with_top_p(Some(0.7)), false),
            (plain.with_min_p(Some(0.05)), false),
            (plain.with_top_k(Some(20)).with_min_p(Some(0.3)).with_penalties(penalties), true),
            (Sampling::greedy().with_penalties(penalties), true),
            (plain, true),
        ];
        // All of them in one batch, one after another, so that no two neighbours draw alike.
        let rows: Vec<SampledRow> = (0..2 * cases.len())
            .map(|row| {
                let (sampling, counted) = cases[row % cases.len()];
                let line = counted.then_some(row / cases.len() * 3 + row % 3);
                SampledRow { sampling: sampling.with_seed(vocabulary as u64, row as u64), line }
            })
            .collect();
        let lines = 6;
        let hidden = random::<B, 2>(1, [rows.len(), 8], &device) * spread;
        let weight = random::<B, 2>(2, [vocabulary, 8], &device);
        let positions: Vec<i32> = (0..rows.len() as i32).map(|row| row * 100).collect();
        let positions = integers::<B, 1>(positions, [rows.len()], &device);
        let counts = || {
            let mut counts = TokenCounts::<B>::new(lines, vocabulary, &device);
            for line in 0..lines {
                let own = (line % vocabulary) as u32;
                counts.begin(line, &[own, 5, 5], &[own], &[(3, 1.5), (2, TokenCounts::<B>::FORBIDDEN)]);
            }
            counts
        };
        let (mut ours, mut theirs) = (counts(), counts());
        let sampled = SampledRows::new(&rows, &device);
        let read = |tokens: Tensor<B, 1, Int>| tokens.into_data().iter::<i64>().collect::<Vec<i64>>();
        let a = read(head_sample(hidden.clone(), weight.clone(), &sampled, positions.clone(), Some(&mut ours)));
        let b = read(plain::head_sample(hidden.clone(), weight.clone(), &sampled, positions.clone(), Some(&mut theirs)));
        let greedy = SampledRows::new(&vec![SampledRow::from(Sampling::greedy()); rows.len()], &device);
        let greedy = read(plain::head_sample(hidden.clone(), weight.clone(), &greedy, positions.clone(), None));
        for (row, SampledRow { sampling, line }) in rows.iter().enumerate() {
            if line.is_none() && (sampling.top_k == Some(1) || sampling.temperature == 0.0) {
                assert_eq!(b[row], greedy[row], "{vocabulary} {sampling:?}: the likeliest, by the reference");
            }
            assert!(line.is_none() || a[row] != 2, "{vocabulary} {sampling:?}: a forbidden token");
            // A row draws the same alone.
            let mut counts = counts();
            let (hidden, positions) = (hidden.clone().narrow(0, row, 1), positions.clone().narrow(0, row, 1));
            let alone = SampledRows::new(&rows[row..row + 1], &device);
            let own = read(head_sample(hidden, weight.clone(), &alone, positions, Some(&mut counts)));
            assert_eq!(own, a[row..row + 1], "{vocabulary} {sampling:?}, alone");
        }
        // Products and logarithms differ in the last bits, and a token may stand right at a cut.
        let differ = a.iter().zip(&b).filter(|(a, b)| a != b).count();
        let allowed = if B::name(&device).contains("cuda") { 2 } else { 1 };
        assert!(differ <= allowed, "{vocabulary} {spread}: {a:?} {b:?}");
        if differ == 0 {
            assert_close("counts", &ours.written, &theirs.written, 0.0);
            assert_close("counts of the prompts", &ours.prompt, &theirs.prompt, 0.0);
        }
    }
});
