//! Attention against the reference.

use std::slice::from_ref;

use burn::backend::Autodiff;
use burn::tensor::{DType, Int, Tensor};
use fireclay_kernels::{
    AttentionMask, AttentionOptions, Backend, Dropout, PackedHeads, RandomKey, attention, attention_weights,
    qkv_attention,
};

use crate::backend_test;
use crate::compare::{Tolerance, assert_close, random, tolerance, values};
use crate::harness::{
    assert_parity, assert_parity_within, dtype_under_test, halves, strided, tolerance_under_test, with_gradients,
};
use crate::plain;

/// Compares attention with the reference, for one mask.
fn attention_parity<B: Backend>(what: &str, inputs: &[Tensor<B, 4>], mask: &AttentionMask<Autodiff<B>>, drop: bool) {
    let head_dim = inputs[0].dims()[3];
    let dropped = drop.then_some(Dropout { probability: 0.25, key: RandomKey::new(8) });
    let options = AttentionOptions::new(head_dim).with_dropout(dropped);
    // For a query that sees one key, and for that key, the gradient is zero.
    assert_parity_within(
        tolerance_under_test::<B>(&inputs[0].device()).or_zero(),
        what,
        inputs,
        |i| attention(i[0].clone(), i[1].clone(), i[2].clone(), mask, options),
        |i| {
            let output = plain::attention(i[0].clone(), i[1].clone(), i[2].clone(), mask, options);
            let [batch_size, seq_length, heads, head_dim] = output.dims();
            output.reshape([batch_size, seq_length, heads * head_dim])
        },
    );
}

backend_test!(attention_matches_the_reference::<B>(device) {
    let ints = |values: &[i32]| Tensor::<Autodiff<B>, 1, Int>::from_data(values, &device);
    for [batch_size, n_heads, n_kv_heads, queries, keys, head_dim] in [
        [1, 1, 1, 1, 1, 2],
        [2, 4, 2, 3, 3, 8],
        [1, 3, 3, 63, 63, 16],
        [2, 6, 2, 65, 65, 5],
        [1, 2, 1, 7, 130, 32],
        [1, 1, 1, 200, 200, 64],
    ] {
        let inputs = [
            random::<B, 4>(1, [batch_size, n_heads, queries, head_dim], &device) * 2.0,
            random::<B, 4>(2, [batch_size, n_kv_heads, keys, head_dim], &device) * 2.0,
            random::<B, 4>(3, [batch_size, n_kv_heads, keys, head_dim], &device),
        ];
        let swapped = inputs.clone().map(strided);
        let positions: Vec<i32> = (0..batch_size * queries).map(|at| (at * 5 % keys) as i32).collect();
        let positions = ints(&positions).reshape([batch_size, queries]);
        let lengths: Vec<i32> = (0..batch_size).map(|row| (keys - row.min(keys - 1)) as i32).collect();
        // Documents of 1 to 40 tokens, and invalid positions.
        let start = |at: usize| if at % 41 == 40 { -3 } else { (at % queries / 40 * 40 + at % 3 / 2 * 7) as i32 };
        let starts: Vec<i32> = (0..batch_size * queries).map(start).collect();
        let starts = ints(&starts).reshape([batch_size, queries]);
        // On two of the sizes: each kind of mask is compiled for each of them.
        let documents = match queries {
            65 => Some(("documents in a window", AttentionMask::Documents { starts, window: Some(5) })),
            200 => Some(("documents", AttentionMask::Documents { starts, window: None })),
            _ => None,
        };
        let mut masks = vec![
            ("full", AttentionMask::None),
            ("causal", AttentionMask::Causal { window: None }),
            ("window", AttentionMask::Causal { window: Some(3) }),
            ("positions", AttentionMask::Positions { positions: positions.clone(), window: None }),
            ("positions in a window", AttentionMask::Positions { positions, window: Some(4) }),
            ("lengths", AttentionMask::Lengths(ints(&lengths))),
        ];
        // Of all kinds, ends out of range and in the wrong order among them.
        let end = |at: usize| [(at * 7 % (keys + 4)) as i32 - 2, (at * 7 % (keys + 4) + at * 3 % 50) as i32 - 3];
        let ranges: Vec<i32> = (0..batch_size * queries).flat_map(end).collect();
        // On other backends than the CPU each mask is compiled for each size.
        if B::is_synchronous() || queries == 65 {
            masks.push(("ranges", AttentionMask::Ranges(ints(&ranges).reshape([batch_size, queries, 2]))));
        }
        masks.extend(documents);
        for (name, mask) in &masks {
            let name = format!("attention {name} {batch_size}x{n_heads}/{n_kv_heads}x{queries}/{keys}x{head_dim}");
            attention_parity(&name, &inputs, mask, false);
            attention_parity(&format!("{name} strided"), &swapped, mask, false);
            attention_parity(&format!("{name} with dropout"), &inputs, mask, true);
        }
    }
});

backend_test!(capped_scores_and_their_gradients_match_the_reference::<B>(device) {
    for ([batch_size, n_heads, n_kv_heads, tokens, head_dim], cap, drop) in
        [([2, 4, 2, 3, 8], 0.5, false), ([1, 3, 1, 65, 6], 2.0, true), ([1, 2, 2, 130, 64], 1.0, false)]
    {
        let heads = |seed, heads| random::<B, 4>(seed, [batch_size, heads, tokens, head_dim], &device) * 2.0;
        let inputs = [heads(1, n_heads), heads(2, n_kv_heads), heads(3, n_kv_heads)];
        let dropped = drop.then_some(Dropout { probability: 0.25, key: RandomKey::new(8) });
        // With larger scores, rounding them to TF32, as the reference does on CUDA, changes gradients
        // of saturated scores by several per cent.
        let scale = 1.1 / (head_dim as f64).sqrt();
        let options = AttentionOptions::new(head_dim).with_scale(scale).with_softcap(Some(cap)).with_dropout(dropped);
        let lengths = Tensor::<Autodiff<B>, 1, Int>::full([batch_size], (tokens - 1) as i64, &device);
        for mask in [
            AttentionMask::Causal { window: None },
            AttentionMask::Causal { window: Some(2) },
            AttentionMask::Lengths(lengths),
        ] {
            assert_parity_within(
                tolerance_under_test::<B>(&device).or_zero(),
                &format!("attention capped at {cap}, {n_heads}/{n_kv_heads}x{tokens}x{head_dim}"),
                &inputs,
                |i| attention(i[0].clone(), i[1].clone(), i[2].clone(), &mask, options),
                |i| {
                    let output = plain::attention(i[0].clone(), i[1].clone(), i[2].clone(), &mask, options);
                    output.reshape([batch_size, tokens, n_heads * head_dim])
                },
            );
        }
    }
});

backend_test!(documents_in_a_row_attend_as_if_each_were_alone::<B>(device) {
    let (lengths, total) = ([1, 70, 3, 66], 140);
    let random = |seed| random::<B, 4>(seed, [1, 2, total, 16], &device);
    let inputs = [random(1), random(2), random(3)];
    let begins: Vec<usize> =
        lengths.iter().scan(0, |end, length| Some(std::mem::replace(end, *end + length))).collect();
    let starts: Vec<i32> = begins.iter().zip(lengths).flat_map(|(begin, length)| vec![*begin as i32; length]).collect();
    let starts = Tensor::<B, 1, Int>::from_data(starts.as_slice(), &device).reshape([1, total]);
    let attend = |[q, k, v]: [Tensor<B, 4>; 3], mask| attention(q, k, v, &mask, AttentionOptions::new(16));
    let together = attend(inputs.clone(), AttentionMask::Documents { starts, window: None });
    let alone = begins.iter().zip(lengths).map(|(begin, length)| {
        let own = inputs.clone().map(|x| x.slice([0..1, 0..2, *begin..begin + length]));
        attend(own, AttentionMask::Causal { window: None })
    });
    assert_close("documents", &together, &Tensor::cat(alone.collect(), 1), 1e-5);
});

backend_test!(attention_weights_times_the_values_are_attention::<B>(device) {
    let query = random::<B, 4>(1, [2, 4, 7, 8], &device) * 2.0;
    let (key, value) = (random::<B, 4>(2, [2, 2, 7, 8], &device) * 2.0, random::<B, 4>(3, [2, 2, 7, 8], &device));
    let lengths = Tensor::<B, 1, Int>::from_data([7, 3], &device);
    for mask in [AttentionMask::None, AttentionMask::Causal { window: Some(4) }, AttentionMask::Lengths(lengths)] {
        let options = AttentionOptions::new(8);
        let weights = attention_weights(query.clone(), key.clone(), &mask, options);
        // Key head j serves two query heads.
        let values = value.clone().reshape([2, 2, 1, 7, 8]).expand([2, 2, 2, 7, 8]).reshape([2, 4, 7, 8]);
        let ours = weights.matmul(values).swap_dims(1, 2).reshape([2, 7, 32]);
        let fused = attention(query.clone(), key.clone(), value.clone(), &mask, options);
        // CUDA multiplies the weights by the values in TF32.
        assert_close("attention weights", &ours, &fused, tolerance::<B>(&device).times(0.2));
    }
});

backend_test!(attention_matches_the_reference_whatever_the_head_size::<B>(device) {
    for head_dim in [1, 32, 80, 128, 256] {
        let inputs = [
            strided(random::<B, 4>(1, [1, 2, 35, head_dim], &device) * 2.0),
            random::<B, 4>(2, [1, 1, 67, head_dim], &device) * 2.0,
            strided(random::<B, 4>(3, [1, 1, 67, head_dim], &device)),
        ];
        let mask = AttentionMask::Causal { window: Some(50) };
        attention_parity(&format!("attention of {head_dim} a head"), &inputs, &mask, true);
    }
});

backend_test!(attention_matches_the_reference_at_the_borders_of_tiles::<B>(device) {
    let causal = |window| AttentionMask::<Autodiff<B>>::Causal { window };
    let inputs = |batch_size: usize, queries: usize, keys: usize| {
        [
            random::<B, 4>(1, [batch_size, 1, queries, 16], &device) * 2.0,
            random::<B, 4>(2, [batch_size, 1, keys, 16], &device) * 2.0,
            random::<B, 4>(3, [batch_size, 1, keys, 16], &device),
        ]
    };
    // Many rows of each length: one row's gradient may be a difference that is lost in half
    // precision.
    // precision rounds away.
    for length in [1, 2, 3, 31, 32, 33, 63, 64, 65, 127, 128, 129] {
        attention_parity(&format!("full {length}"), &inputs(16, length, length), &AttentionMask::None, false);
        attention_parity(&format!("causal {length}"), &inputs(16, length, length), &causal(None), false);
        attention_parity(&format!("causal {length}/130"), &inputs(16, length, 130), &causal(None), false);
    }
    for window in [1, 2, 31, 32, 33, 63, 64, 65, 66, 127, 128, 129, 1000] {
        let what = format!("window of {window}");
        attention_parity(&what, &inputs(1, 200, 200), &causal(Some(window)), false);
        attention_parity(&format!("{what}, few queries"), &inputs(1, 66, 200), &causal(Some(window)), false);
    }
    for length in [1, 32, 63, 64, 65, 128, 130] {
        let lengths = Tensor::from_data([length, 130 - length / 2], &device);
        attention_parity(&format!("length {length}"), &inputs(2, 33, 130), &AttentionMask::Lengths(lengths), false);
    }
    attention_parity("long", &inputs(1, 1000, 1000), &causal(None), true);
    attention_parity("long in a window", &inputs(1, 1000, 1000), &causal(Some(300)), false);
});

backend_test!(attention_takes_keys_that_all_heads_and_rows_share::<B>(device) {
    let dtype = dtype_under_test::<B>(&device);
    let query = random::<B, 4>(1, [2, 4, 70, 64], &device) * 2.0;
    let [key, value] = [2, 3].map(|seed| random::<B, 4>(seed, [1, 1, 70, 64], &device).cast(dtype));
    let options = AttentionOptions::new(64);
    let shared = |x: &Tensor<B, 4>, like: &Tensor<Autodiff<B>, 4>| {
        Tensor::from_inner(x.clone().cast(like.dtype()).expand([2, 4, 70, 64]))
    };
    for mask in [AttentionMask::None, AttentionMask::Causal { window: None }] {
        assert_parity(
            "attention of expanded keys and values",
            from_ref(&query),
            |i| attention(i[0].clone(), shared(&key, &i[0]), shared(&value, &i[0]), &mask, options),
            |i| {
                let [key, value] = [&key, &value].map(|x| shared(x, &i[0]));
                plain::attention(i[0].clone(), key, value, &mask, options).reshape([2, 70, 256])
            },
        );
    }
});

backend_test!(attention_of_queries_without_keys_is_finite::<B>(device) {
    let inputs = [4, 5, 6].map(|seed| random::<B, 4>(seed, [2, 1, 70, 16], &device));
    let lengths = AttentionMask::Lengths(Tensor::from_data([0, 70], &device));
    let options = AttentionOptions::new(16);
    let attend = |i: &[Tensor<Autodiff<B>, 4>]| attention(i[0].clone(), i[1].clone(), i[2].clone(), &lengths, options);
    let (output, gradients) = with_gradients(&inputs, DType::F32, attend);
    assert!(values(&output).iter().all(|x| x.is_finite()), "output");
    let alone = inputs.clone().map(|x| x.narrow(0, 1, 1));
    let mask = AttentionMask::<Autodiff<B>>::None;
    let alone =
        with_gradients(&alone, DType::F32, |i| attention(i[0].clone(), i[1].clone(), i[2].clone(), &mask, options)).0;
    assert_close("the other row", &output.narrow(0, 1, 1), &alone, tolerance::<B>(&device));
    for gradient in gradients {
        assert!(values(&gradient).iter().all(|x| x.is_finite()), "gradient");
    }
});

/// An attention with 16-bit inputs: sizes `[batch_size, n_heads, n_kv_heads, queries, keys,
/// head_dim]`, the index of its mask in [`attention_in_half_precision`], and whether it has
/// dropout.
type HalfPrecisionCase = ([usize; 6], usize, bool);

/// Forward and gradients of attention in the supported ones of bf16 and f16, compared with the
/// reference in f32.
fn attention_in_half_precision<B: Backend>(device: &B::Device, cases: &[HalfPrecisionCase]) {
    for dtype in halves::<B>(device) {
        for ([batch_size, n_heads, n_kv_heads, queries, keys, head_dim], mask, drop) in cases.iter().copied() {
            // Rounded first, so that both sides start from the same values.
            let rounded = |x: Tensor<B, 4>| x.cast(dtype).cast(DType::F32);
            let inputs = [
                rounded(random::<B, 4>(1, [batch_size, n_heads, queries, head_dim], device) * 2.0),
                rounded(random::<B, 4>(2, [batch_size, n_kv_heads, keys, head_dim], device) * 2.0),
                rounded(random::<B, 4>(3, [batch_size, n_kv_heads, keys, head_dim], device)),
            ];
            let ints = |values: &[i32]| Tensor::<Autodiff<B>, 1, Int>::from_data(values, device);
            let tokens = |of: fn(usize, usize) -> i32| {
                let values: Vec<_> = (0..batch_size * queries).map(|at| of(at / queries, at % queries)).collect();
                ints(&values).reshape([batch_size, queries])
            };
            let positions: Vec<i32> = (0..batch_size * queries).map(|at| (at * 5 % keys) as i32).collect();
            let lengths: Vec<i32> = (0..batch_size).map(|row| (keys - row * keys / 2) as i32).collect();
            // The second row of the batch has documents of other lengths; tokens of the last kind
            // start anywhere, also at invalid positions.
            let starts = tokens(|row, at| (at / (45 + 100 * row) * (45 + 100 * row)) as i32);
            let places = tokens(|_, at| if at % 41 == 40 { -3 } else { (at / 90 * 90 + at % 3 / 2 * 70) as i32 });
            let masks = [
                AttentionMask::None,
                AttentionMask::Causal { window: None },
                AttentionMask::Causal { window: Some(70) },
                AttentionMask::Positions {
                    positions: ints(&positions).reshape([batch_size, queries]),
                    window: Some(4),
                },
                AttentionMask::Lengths(ints(&lengths)),
                AttentionMask::Documents { starts, window: None },
                AttentionMask::Documents { starts: places, window: Some(130) },
            ];
            let what =
                format!("{dtype:?} {n_heads}/{n_kv_heads}x{queries}/{keys}x{head_dim}, mask {mask}, dropout {drop}");
            let mask = &masks[mask];
            let dropped = drop.then_some(Dropout { probability: 0.25, key: RandomKey::new(8) });
            let options = AttentionOptions::new(head_dim).with_dropout(dropped);
            let (output, gradients) = with_gradients(&inputs, DType::F32, |i| {
                let [q, k, v] = [0, 1, 2].map(|at| i[at].clone().cast(dtype));
                attention(q, k, v, mask, options).cast(DType::F32)
            });
            let (wanted, wanted_gradients) = with_gradients(&inputs, DType::F32, |i| {
                let output = plain::attention(i[0].clone(), i[1].clone(), i[2].clone(), mask, options);
                output.reshape([batch_size, queries, n_heads * head_dim])
            });
            assert_close(&what, &output, &wanted, Tolerance::new(1e-2, dtype));
            for (at, (gradient, wanted)) in gradients.iter().zip(&wanted_gradients).enumerate() {
                // Queries that see one key, or none, have no gradient.
                let tolerance = Tolerance::new(2e-2, dtype).or_zero();
                assert_close(&format!("{what}, gradient of input {at}"), gradient, wanted, tolerance);
            }
        }
    }
}

backend_test!(attention_in_half_precision_is_close_to_the_reference::<B>(device) {
    let cases = [
        ([2, 4, 2, 300, 300, 64], 1, true),
        ([2, 4, 2, 300, 300, 64], 1, false),
        ([1, 1, 1, 129, 129, 64], 2, false),
        ([1, 2, 1, 7, 130, 64], 3, true),
        ([2, 2, 2, 70, 130, 64], 4, false),
        ([1, 1, 1, 65, 63, 16], 0, false),
        ([1, 2, 1, 1, 200, 48], 3, false),
        ([2, 2, 2, 129, 129, 80], 2, true),
        ([1, 2, 1, 200, 200, 128], 1, false),
        ([1, 4, 2, 200, 333, 64], 1, false),
        ([2, 2, 1, 100, 260, 128], 2, false),
        ([2, 3, 3, 150, 150, 64], 0, false),
        ([1, 2, 2, 140, 70, 128], 0, false),
        ([1, 1, 1, 130, 130, 144], 1, true),
        ([1, 2, 1, 100, 100, 256], 1, false),
        ([1, 2, 1, 65, 65, 33], 4, true),
        ([2, 2, 1, 150, 150, 64], 5, false),
        ([1, 2, 2, 130, 130, 32], 5, true),
    ];
    attention_in_half_precision::<B>(&device, &cases);
});

backend_test!(attention_of_heads_of_64_and_128_is_close_to_the_reference_under_every_mask::<B>(device) {
    let cases = [
        ([2, 4, 2, 300, 300, 64], 5, true),
        ([2, 4, 2, 300, 300, 64], 5, false),
        ([2, 2, 1, 300, 300, 128], 5, true),
        ([2, 2, 1, 260, 260, 128], 5, false),
        ([2, 2, 2, 400, 400, 64], 6, true),
        ([1, 2, 2, 400, 400, 128], 6, false),
        ([3, 2, 2, 200, 300, 64], 4, true),
        ([3, 4, 2, 129, 260, 64], 4, false),
        ([2, 2, 1, 260, 390, 128], 4, true),
        ([2, 2, 1, 130, 260, 128], 4, false),
        ([2, 4, 2, 100, 260, 128], 2, true),
        ([2, 2, 2, 257, 257, 64], 2, true),
        ([1, 2, 1, 65, 300, 64], 0, true),
        ([1, 2, 2, 200, 70, 128], 0, true),
    ];
    attention_in_half_precision::<B>(&device, &cases);
});

backend_test!(packed_attention_is_attention::<B>(device) {
    for (heads, batch_size, seq_length) in [
        (PackedHeads { n_heads: 1, n_kv_heads: 1, head_dim: 2 }, 1, 1),
        (PackedHeads { n_heads: 4, n_kv_heads: 2, head_dim: 8 }, 2, 65),
        (PackedHeads { n_heads: 3, n_kv_heads: 3, head_dim: 32 }, 2, 64),
        (PackedHeads { n_heads: 4, n_kv_heads: 2, head_dim: 64 }, 2, 131),
    ] {
        let qkv = random::<B, 3>(1, [batch_size, seq_length, heads.width()], &device) * 2.0;
        let options = AttentionOptions::new(heads.head_dim);
        let mask = AttentionMask::Causal { window: None };
        assert_parity(
            &format!("{heads:?} {batch_size}x{seq_length}"),
            &[qkv],
            |qkv| qkv_attention(qkv[0].clone(), heads, &mask, options),
            |qkv| {
                let [query, key, value] = heads.split(qkv[0].clone());
                let output = plain::attention(query, key, value, &mask, options);
                output.reshape([batch_size, seq_length, heads.n_heads * heads.head_dim])
            },
        );
    }
});
