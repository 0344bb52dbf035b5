//! Attention over a KV cache against the reference.

use burn::tensor::{DType, FloatDType, Tensor, TensorData};
use fireclay_kernels::{
    AttentionMask, AttentionOptions, Backend, CacheDType, CachedRow, CachedTokens, LayerCache, Norm, PackedHeads,
    Placement, RotaryTable, cached_attention, sink_attention,
};

use crate::backend_test;
use crate::compare::{assert_close, random, values};
use crate::harness::dtypes;
use crate::plain;

/// Growing cache rows, in scattered pages.
struct Growing {
    page_tokens: usize,
    lengths: Vec<usize>,
    pages: Vec<Vec<u32>>,
    /// Free pages, in random order.
    left: Vec<u32>,
}

impl Growing {
    fn new(rows: usize, page_tokens: usize, pages: usize) -> Self {
        let left = (0..pages).map(|page| (page * 7 % pages) as u32).collect();
        assert!(!pages.is_multiple_of(7), "every page once");
        Self { page_tokens, lengths: vec![0; rows], pages: vec![Vec::new(); rows], left }
    }

    /// The rows `which` with this many more tokens each.
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

/// A step's attention, and that of plain operations in f32, each with a cache of its own.
fn ours_and_plain<B: Backend>(
    qkv: Tensor<B, 2>,
    heads: PackedHeads,
    placement: &Placement<B>,
    options: AttentionOptions,
    at: &CachedTokens<B>,
    [ours, theirs]: [&mut LayerCache<B>; 2],
) -> [Tensor<B, 2>; 2] {
    let a = cached_attention(qkv.clone(), heads, placement.clone(), options, at, ours).cast(DType::F32);
    let b = plain::cached_attention(qkv.cast(DType::F32), heads, placement.clone(), options, at, theirs);
    let size = a.dims();
    [a, b.reshape(size)]
}

backend_test!(cached_attention_matches_the_reference_step_by_step::<B>(device) {
    let shapes = [
        (PackedHeads { n_heads: 1, n_kv_heads: 1, head_dim: 2 }, 1),
        (PackedHeads { n_heads: 4, n_kv_heads: 2, head_dim: 10 }, 2),
        (PackedHeads { n_heads: 10, n_kv_heads: 1, head_dim: 24 }, 3),
        (PackedHeads { n_heads: 4, n_kv_heads: 2, head_dim: 128 }, 1),
        // So many rows that heads of a group are processed together.
        (PackedHeads { n_heads: 8, n_kv_heads: 2, head_dim: 16 }, 80),
    ];
    for (dtype, tolerance) in dtypes::<B>(&device) {
        for (heads, batch_size) in shapes {
            let head_dim = heads.head_dim;
            let options = AttentionOptions::new(head_dim);
            // Rounding matters more if a score is the sum of two products.
            let tolerance = if head_dim == 2 { tolerance.times(3.0) } else { tolerance };
            let frequencies: Vec<f64> = (0..head_dim / 2).map(|at| 0.7f64.powi(at as i32)).collect();
            let gamma = |seed| Norm::rms(random::<B, 1>(seed, [head_dim], &device) + 1.5, 1e-6);
            let bare = Placement::none();
            let full = Placement {
                query_norm: Some(gamma(1)),
                key_norm: Some(gamma(2)),
                rotary: Some(RotaryTable::new(700, &frequencies, 1.0, &device)),
                sinks: None,
            };
            // Rows with and without a common prefix, and more keys than one piece; pages of few and
            // many tokens.
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
                let pages =
                    (0..3).map(|at| (starts[at] + 12usize).div_ceil(page_tokens)).max().expect("rows") * batch_size;
                let pages = if pages.is_multiple_of(7) { pages + 1 } else { pages };
                let mut cases = vec![(CacheDType::Float(dtype), CacheDType::Float(FloatDType::F32), tolerance)];
                // On other backends than the CPU, each case is compiled.
                let some = B::is_synchronous() || [1, 64].contains(&page_tokens);
                if some && head_dim.is_multiple_of(CacheDType::INT8_COLUMNS) {
                    // A value halfway between two bytes may round either way; and bytes only
                    // approximate the floats.
                    cases.push((CacheDType::Int8, CacheDType::Int8, tolerance.at_least(3e-3)));
                    cases.push((CacheDType::Int8, CacheDType::Float(FloatDType::F32), tolerance.at_least(3e-2)));
                }
                for (own, other, tolerance) in cases {
                    let mut ours = LayerCache::<B>::new(pages, page_tokens, heads, own, &device);
                    let mut theirs = LayerCache::<B>::new(pages, page_tokens, heads, other, &device);
                    let mut rows = Growing::new(batch_size, page_tokens, pages);
                    // All earlier tokens at once; one more token each; then several for some rows
                    // and one for others; then one each.
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
                        let [a, b] = ours_and_plain(qkv, heads, placement, options, &at, [&mut ours, &mut theirs]);
                        let what = format!(
                            "{heads:?} {dtype:?}, {own:?} with {other:?}, window {window:?} starts {starts:?}, step \
                             {step}"
                        );
                        assert_close(&what, &a, &b, tolerance);
                        last = Some((which, at));
                    }
                }
            }
        }
    }
});

backend_test!(scales_caps_and_partial_rotation_match_the_reference::<B>(device) {
    for (dtype, tolerance) in dtypes::<B>(&device) {
        for (heads, half, normed) in [
            (PackedHeads { n_heads: 4, n_kv_heads: 2, head_dim: 10 }, 5, true),
            (PackedHeads { n_heads: 6, n_kv_heads: 2, head_dim: 24 }, 9, false),
            (PackedHeads { n_heads: 3, n_kv_heads: 1, head_dim: 16 }, 1, true),
        ] {
            let head_dim = heads.head_dim;
            let frequencies: Vec<f64> = (0..half).map(|at| 0.7f64.powi(at)).collect();
            let gamma = |seed| normed.then(|| Norm::rms(random::<B, 1>(seed, [head_dim], &device) + 1.5, 1e-6));
            let rotary = Some(RotaryTable::new(700, &frequencies, 1.3, &device));
            let sinks = normed.then(|| random::<B, 1>(3, [heads.n_heads], &device) * 3.0);
            let placement = Placement { query_norm: gamma(1), key_norm: gamma(2), rotary, sinks };
            let usual = AttentionOptions::new(head_dim);
            for (options, window) in [
                (usual, Some(40)),
                (usual.with_scale(0.07), None),
                (usual.with_scale(1.1).with_softcap(Some(0.8)), None),
                (usual.with_softcap(Some(2.0)), Some(3)),
            ] {
                let (pages, page_tokens) = (20, 32);
                let cache = |dtype| LayerCache::<B>::new(pages, page_tokens, heads, CacheDType::Float(dtype), &device);
                let (mut ours, mut theirs) = (cache(dtype), cache(FloatDType::F32));
                let mut rows = Growing::new(3, page_tokens, pages);
                let steps: [&[(usize, usize)]; 3] =
                    [&[(0, 3), (1, 70), (2, 1)], &[(0, 1), (1, 1), (2, 1)], &[(0, 5), (2, 1)]];
                for (step, which) in steps.into_iter().enumerate() {
                    let at = CachedTokens::new(rows.grown(which), window, &device);
                    let tokens: usize = which.iter().map(|(_, tokens)| tokens).sum();
                    let qkv = random::<B, 2>(20 + step as u64, [tokens, heads.width()], &device).cast(dtype) * 2.0;
                    let a = cached_attention(qkv.clone(), heads, placement.clone(), options, &at, &mut ours);
                    let b = plain::cached_attention(
                        qkv.cast(DType::F32),
                        heads,
                        placement.clone(),
                        options,
                        &at,
                        &mut theirs,
                    );
                    let b = b.reshape([tokens, heads.n_heads * head_dim]);
                    let what =
                        format!("{heads:?}, {half} pairs, {dtype:?}, {options:?}, window {window:?}, step {step}");
                    assert_close(&what, &a.cast(DType::F32), &b, tolerance.times(2.0));
                }
            }
        }
    }
});

backend_test!(sinks_of_a_cache_are_those_of_attention_without_one::<B>(device) {
    for (dtype, tolerance) in dtypes::<B>(&device) {
        for heads in [
            PackedHeads { n_heads: 1, n_kv_heads: 1, head_dim: 2 },
            PackedHeads { n_heads: 6, n_kv_heads: 2, head_dim: 10 },
            PackedHeads { n_heads: 4, n_kv_heads: 2, head_dim: 64 },
        ] {
            let PackedHeads { n_heads, head_dim, .. } = heads;
            let options = AttentionOptions::new(head_dim);
            let placement = Placement { sinks: Some(random::<B, 1>(3, [n_heads], &device) * 3.0), ..Placement::none() };
            for window in [None, Some(3)] {
                let (pages, page_tokens) = (20, 32);
                let mut cache =
                    LayerCache::<B>::new(pages, page_tokens, heads, CacheDType::Float(dtype), &device);
                // A short row, and one of more keys than a piece.
                let (lengths, mut rows) = ([8, 301], Growing::new(2, page_tokens, pages));
                let whole = lengths.map(|tokens| {
                    random::<B, 3>(20 + tokens as u64, [1, tokens, heads.width()], &device).cast(dtype)
                });
                let full = whole.clone().map(|qkv| {
                    let [query, key, value] = heads.split(qkv.cast(DType::F32));
                    let sinks = placement.sinks.clone().expect("the case has sinks");
                    sink_attention(query, key, value, sinks, &AttentionMask::Causal { window }, options)
                });
                let steps: [&[(usize, usize)]; 4] = [&[(0, 3), (1, 290)], &[(0, 1), (1, 1)], &[(0, 4), (1, 1)], &[(1, 9)]];
                let mut done = [0, 0];
                for (step, which) in steps.into_iter().enumerate() {
                    let at = CachedTokens::new(rows.grown(which), window, &device);
                    let new = which.iter().map(|(row, tokens)| whole[*row].clone().narrow(1, done[*row], *tokens));
                    let qkv = Tensor::cat(new.collect(), 1).squeeze_dim::<2>(0);
                    let ours = cached_attention(qkv, heads, placement.clone(), options, &at, &mut cache);
                    let mut first = 0;
                    for (row, tokens) in which.iter().copied() {
                        let own = ours.clone().narrow(0, first, tokens).cast(DType::F32);
                        let wanted = full[row].clone().narrow(1, done[row], tokens).squeeze_dim::<2>(0);
                        let what = format!("{heads:?} {dtype:?}, window {window:?}, step {step}, row {row}");
                        assert_close(&what, &own, &wanted, tolerance.times(2.0));
                        (first, done[row]) = (first + tokens, done[row] + tokens);
                    }
                }
                assert_eq!(done, lengths);
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
    // Short rows and long ones, whole tiles and parts; chunks after cached tokens, together with
    // rows of one token; finally few tokens.
    let steps: [&[(usize, usize)]; 4] = [
        &[(0, 130), (1, 2), (2, 64), (3, 257), (4, 1), (5, 37), (6, 128)],
        &[(1, 1), (2, 1), (0, 61), (3, 129), (4, 3), (5, 1), (6, 200)],
        &[(4, 300), (6, 1), (0, 1), (1, 65)],
        &[(3, 5), (5, 2), (1, 7)],
    ];
    for (dtype, tolerance) in dtypes::<B>(&device) {
        for heads in shapes {
            let (head_dim, options) = (heads.head_dim, AttentionOptions::new(heads.head_dim));
            let frequencies: Vec<f64> = (0..head_dim / 2).map(|at| 0.7f64.powi(at as i32)).collect();
            let placement = Placement {
                query_norm: Some(Norm::rms(random::<B, 1>(1, [head_dim], &device) + 1.5, 1e-6)),
                key_norm: Some(Norm::rms(random::<B, 1>(2, [head_dim], &device) + 1.5, 1e-6)),
                rotary: Some(RotaryTable::new(700, &frequencies, 1.0, &device)),
                sinks: None,
            };
            for window in [None, Some(1), Some(100)] {
                let page_tokens = 64;
                let pages = 33;
                let mut ours = LayerCache::<B>::new(pages, page_tokens, heads, CacheDType::Float(dtype), &device);
                let mut theirs =
                    LayerCache::<B>::new(pages, page_tokens, heads, CacheDType::Float(FloatDType::F32), &device);
                // Another sequence left NaN in every page: a row must only read its own tokens.
                for page in 0..pages as u32 {
                    let row = CachedRow { pages: [page].into(), tokens: page_tokens, keys: page_tokens };
                    let at = CachedTokens::new(vec![row], None, &device);
                    let nothing = || Tensor::<B, 2>::full([page_tokens, heads.width()], f32::NAN, &device);
                    let bare = Placement::none();
                    cached_attention(nothing().cast(dtype), heads, bare.clone(), options, &at, &mut ours);
                    plain::cached_attention(nothing(), heads, bare, options, &at, &mut theirs);
                }
                let mut rows = Growing::new(7, page_tokens, pages);
                for (step, which) in steps.iter().enumerate() {
                    let at = CachedTokens::new(rows.grown(which), window, &device);
                    let tokens: usize = which.iter().map(|(_, tokens)| tokens).sum();
                    let qkv = random::<B, 2>(20 + step as u64, [tokens, heads.width()], &device).cast(dtype);
                    let [a, b] = ours_and_plain(qkv, heads, &placement, options, &at, [&mut ours, &mut theirs]);
                    // Row by row: a small one would be lost among the others.
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
    let bare = || Placement::none();
    for dtype in [CacheDType::Float(FloatDType::F32), CacheDType::Int8] {
        let outputs = [(1024, 3), (64, 27), (16, 101)].map(|(page_tokens, pages)| {
            let mut cache = LayerCache::<B>::new(pages, page_tokens, heads, dtype, &device);
            let mut rows = Growing::new(2, page_tokens, pages);
            let steps = [[(0, 300), (1, 700)], [(0, 1), (1, 1)], [(0, 30), (1, 1)], [(0, 1), (1, 1)]];
            steps.map(|which| {
                let tokens = which.iter().map(|(_, tokens)| tokens).sum();
                let at = CachedTokens::new(rows.grown(&which), None, &device);
                let qkv = random::<B, 2>(tokens as u64, [tokens, heads.width()], &device);
                let output = cached_attention(qkv, heads, bare(), AttentionOptions::new(16), &at, &mut cache);
                output.into_data().iter::<f32>().map(f32::to_bits).collect::<Vec<u32>>()
            })
        });
        assert!(outputs[0] == outputs[1] && outputs[1] == outputs[2], "{dtype:?}");
    }
});

backend_test!(what_is_no_number_stays_in_its_row_and_is_not_lost::<B>(device) {
    let heads = PackedHeads { n_heads: 4, n_kv_heads: 2, head_dim: 16 };
    let bare = || Placement::none();
    for dtype in [CacheDType::Float(FloatDType::F32), CacheDType::Int8] {
        let mut cache = LayerCache::<B>::new(3, 64, heads, dtype, &device);
        let mut pass = |rows: &[(&[u32], usize, usize)], bad: Option<usize>| {
            let rows: Vec<CachedRow> = rows
                .iter()
                .map(|(pages, tokens, keys)| CachedRow { pages: (*pages).into(), tokens: *tokens, keys: *keys })
                .collect();
            let tokens = rows.iter().map(|row| row.tokens).sum::<usize>();
            let mut qkv = values(&random::<B, 2>(tokens as u64, [tokens, heads.width()], &device));
            if let Some(bad) = bad {
                qkv[bad * heads.width()..][..heads.width()].fill(f32::NAN);
            }
            let qkv = Tensor::from_data(TensorData::new(qkv, [tokens, heads.width()]), &device);
            let output = values(&cached_attention(
                qkv,
                heads,
                bare(),
                AttentionOptions::new(16),
                &CachedTokens::new(rows, None, &device),
                &mut cache,
            ));
            output.chunks_exact(64).map(|row| row.iter().all(|value| value.is_finite())).collect::<Vec<bool>>()
        };
        // The third of five tokens; those after it see it, and so does the next decoded token.
        assert_eq!(pass(&[(&[0], 5, 5)], Some(2))[2..], [false; 3], "{dtype:?}");
        assert_eq!(pass(&[(&[0], 1, 6)], None), [false], "{dtype:?}");
        // Another row takes its page, together with a longer one, so that more is read than it has.
        assert_eq!(pass(&[(&[0], 2, 2), (&[1, 2], 90, 90)], None), [true; 92], "{dtype:?}");
        assert_eq!(pass(&[(&[0], 1, 3), (&[1, 2], 1, 91)], None), [true; 2], "{dtype:?}");
    }
});
