//! Logits and sampling against the reference and the distributions asked for.

use burn::tensor::{DType, Int, Tensor};
use fireclay_kernels::operands::{Checked, Logits};
use fireclay_kernels::{
    Backend, Penalties, SampledRow, SampledRows, Sampling, TokenCounts, head_sample, head_sample_logits,
};

use crate::backend_test;
use crate::compare::{assert_close, random, values};
use crate::harness::{dtypes, integers};
use crate::plain;

/// Rows with equal parameters, each with a line of counts if there are penalties.
fn each_by_its_own_numbers<B: Backend>(sampling: Sampling, rows: usize, device: &B::Device) -> SampledRows<B> {
    let row = |row: usize| {
        let line = (!sampling.penalties.are_none()).then_some(row);
        SampledRow { sampling: sampling.with_seed(11, row as u64), line }
    };
    SampledRows::new(&(0..rows).map(row).collect::<Vec<_>>(), device)
}

backend_test!(sampling_draws_what_the_distribution_says::<B>(device) {
    // One hidden value per row, so that the weights are the logits.
    let logits = [2.0f32, 1.0, 0.5, 0.0, -1.0, -3.0];
    let rows = 4000;
    let hidden = Tensor::<B, 2>::ones([rows, 1], &device);
    let weight = Tensor::<B, 1>::from_data(logits.as_slice(), &device).reshape([6, 1]);
    let positions = Tensor::<B, 1, Int>::zeros([rows], &device);
    let draw = |sampling: Sampling| -> Vec<usize> {
        let drawn_rows = each_by_its_own_numbers(sampling, rows, &device);
        let drawn = head_sample(hidden.clone(), weight.clone(), &drawn_rows, positions.clone(), None).into_data();
        let mut counts = vec![0; logits.len()];
        drawn.iter::<i64>().for_each(|token| counts[token as usize] += 1);
        counts
    };
    let plain = Sampling::greedy().with_temperature(0.7);
    let cases = [
        ("plain", plain, 6),
        ("top-k", plain.with_top_k(Some(3)), 3),
        ("top-p", plain.with_top_p(Some(0.85)), 2),
        ("top-k and top-p", plain.with_top_k(Some(4)).with_top_p(Some(0.999)), 4),
        ("tiny top-p", plain.with_top_p(Some(0.01)), 1),
        ("min-p", plain.with_min_p(Some(0.1)), 3),
        ("min-p of one", plain.with_min_p(Some(1.0)), 1),
    ];
    for (name, sampling, kept) in cases {
        let counts = draw(sampling);
        let exact: Vec<f64> = logits[..kept].iter().map(|logit| (f64::from(*logit) / 0.7).exp()).collect();
        let total: f64 = exact.iter().sum();
        let mut chi_square = 0.0;
        for (count, exact) in counts.iter().zip(&exact) {
            let expected = exact / total * rows as f64;
            chi_square += (*count as f64 - expected).powi(2) / expected;
        }
        assert_eq!(counts[kept..].iter().sum::<usize>(), 0, "{name}: {counts:?}");
        // At most five degrees of freedom: 25 is exceeded once in ten thousand times, and the
        // samples are fixed.
        assert!(chi_square < 25.0, "{name}: {counts:?}, chi-square {chi_square:.1}");
        assert_eq!(counts, draw(sampling), "{name}: the same seed draws the same");
    }
    assert_eq!(draw(Sampling::greedy())[0], rows, "greedy takes the top token");
});

backend_test!(penalties_lower_the_words_that_a_text_has::<B>(device) {
    let logits = [2.0f32, 1.0, 0.5, 0.0, -1.0, -3.0];
    let rows = 4000;
    let hidden = Tensor::<B, 2>::ones([rows, 1], &device);
    let weight = Tensor::<B, 1>::from_data(logits.as_slice(), &device).reshape([6, 1]);
    let mut counts = TokenCounts::<B>::of_prompts(&vec![&[0, 5, 0][..]; rows], 6, &device);
    let twice = Tensor::<B, 1>::from_data([0.0, 2.0, 0.0, 0.0, 0.0, 0.0], &device);
    counts.written = twice.unsqueeze::<2>().repeat_dim(0, rows);
    let positions = Tensor::<B, 1, Int>::zeros([rows], &device);
    let penalties = Penalties { repetition: 1.5, presence: 0.3, frequency: 0.2 };
    let sampling = Sampling::greedy().with_temperature(0.7).with_penalties(penalties);
    let mut drawn = [0; 6];
    let drawn_rows = each_by_its_own_numbers(sampling, rows, &device);
    let mut after = counts.clone();
    let tokens = head_sample(hidden.clone(), weight.clone(), &drawn_rows, positions.clone(), Some(&mut after));
    let tokens = tokens.into_data();
    let added = values(&(after.written - counts.written.clone()));
    for (row, token) in tokens.iter::<i64>().enumerate() {
        let own = &added[row * 6..][..6];
        assert!(own[token as usize] == 1.0 && own.iter().sum::<f32>() == 1.0, "row {row} counts what it drew: {own:?}");
    }
    tokens.iter::<i64>().for_each(|token| drawn[token as usize] += 1);
    // The repetition penalty counts prompt tokens; the generated token counts for all, and occurred
    // twice.
    let exact: [f64; 6] = [2.0 / 1.5, 1.0 / 1.5 - 0.3 - 2.0 * 0.2, 0.5, 0.0, -1.0, -3.0 * 1.5];
    let exact = exact.map(|logit| (logit / 0.7).exp());
    let total: f64 = exact.iter().sum();
    let terms = drawn.iter().zip(exact).map(|(count, exact)| {
        let expected = exact / total * rows as f64;
        (f64::from(*count) - expected).powi(2) / expected
    });
    let chi_square: f64 = terms.sum();
    assert!(chi_square < 25.0, "{drawn:?}, chi-square {chi_square:.1}");

    let strong = Penalties { repetition: 1.0, presence: 0.0, frequency: -2.0 };
    let greedy = Sampling::greedy().with_penalties(strong);
    let rows = each_by_its_own_numbers(greedy, rows, &device);
    let tokens = head_sample(hidden, weight, &rows, positions, Some(&mut counts)).into_data();
    assert!(tokens.iter::<i64>().all(|token| token == 1), "they apply to the top token, too");
});

backend_test!(logits_of_many_rows_are_wide_whatever_the_weight::<B>(device) {
    for (dtype, tolerance) in dtypes::<B>(&device) {
        for [rows, d_input, d_output] in [[256, 640, 2048], [300, 384, 1500], [40, 24, 60]] {
            let hidden = random::<B, 2>(1, [rows, d_input], &device).cast(dtype);
            let weight = random::<B, 2>(2, [d_output, d_input], &device);
            // The result of a cast or a narrowing has padded rows.
            let narrowed = random::<B, 2>(3, [d_output, d_input + 8], &device).cast(dtype).narrow(1, 0, d_input);
            for weight in [weight.clone(), weight.cast(dtype), narrowed] {
                let what = format!("{rows}x{d_input}x{d_output} {dtype:?} by {:?}", weight.dtype());
                let rounded = weight.clone().cast(dtype).cast(DType::F32);
                let wanted = plain::linear(hidden.clone().cast(DType::F32), rounded, None);
                let ours = B::logits(Checked::new(Logits { hidden: hidden.clone(), weight: weight.clone().into() }));
                assert_eq!(ours.dtype(), DType::F32, "{what}");
                assert_close(&what, &ours, &wanted, tolerance);
                // And together with the greedy tokens.
                let greedy = SampledRows::new(&vec![SampledRow::from(Sampling::greedy()); rows], &device);
                let positions = Tensor::<B, 1, Int>::zeros([rows], &device);
                let (tokens, logits) = head_sample_logits(hidden.clone(), weight, &greedy, positions, None);
                assert_close(&what, &logits, &wanted, tolerance);
                let tokens: Vec<i64> = tokens.into_data().iter::<i64>().collect();
                for (row, (token, logits)) in tokens.iter().zip(values(&logits).chunks(d_output)).enumerate() {
                    let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                    assert_eq!(logits[*token as usize], most, "{what}, row {row}");
                }
            }
        }
    }
});

// Few and many occurrences of a token, in vocabularies that are not multiples of four, in a line
// that was used before.
backend_test!(token_counts_are_how_often_each_stands_in_a_text::<B>(device) {
    for (vocabulary, most) in [(6, 2), (103, 255), (64, 300), (33, 1)] {
        let mut counts = TokenCounts::<B>::new(3, vocabulary, &device);
        let text = |seed: usize| -> Vec<u32> {
            let mut text: Vec<u32> = (0..most).map(|_| (seed % vocabulary) as u32).collect();
            text.extend(
                (0..vocabulary)
                    .step_by(seed)
                    .map(|token| token as u32)
                    .filter(|token| *token as usize != seed % vocabulary),
            );
            text
        };
        let sequences = [text(2), text(5), vec![]];
        for line in [0, 2, 1] {
            counts.begin(line, &text(3), &text(4), &[(1, 1.0)]);
            counts.begin(line, &sequences[line], &sequences[(line + 1) % 3], &[]);
        }
        let wanted = |text: &[u32]| -> Vec<f32> {
            let mut counts = vec![0.0; vocabulary];
            text.iter().for_each(|token| counts[*token as usize] += 1.0);
            counts
        };
        let all = |shift: usize| (0..3).flat_map(|line| wanted(&sequences[(line + shift) % 3])).collect::<Vec<f32>>();
        assert_eq!(values(&counts.prompt), all(0), "{vocabulary}, prompts");
        assert_eq!(values(&counts.written), all(1), "{vocabulary}, behind them");
        assert_eq!(values(&counts.bias), vec![0.0; 3 * vocabulary], "{vocabulary}, biases");
    }
});

backend_test!(draws_are_those_of_the_reference::<B>(device) {
    // Narrow and wide vocabularies, flat and peaked ones, and cuts that few or many tokens exceed.
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
        // All of them in one batch, interleaved, so that neighbours differ.
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
        let b =
            read(plain::head_sample(hidden.clone(), weight.clone(), &sampled, positions.clone(), Some(&mut theirs)));
        let greedy = SampledRows::new(&vec![SampledRow::from(Sampling::greedy()); rows.len()], &device);
        let greedy = read(plain::head_sample(hidden.clone(), weight.clone(), &greedy, positions.clone(), None));
        for (row, SampledRow { sampling, line }) in rows.iter().enumerate() {
            if line.is_none() && (sampling.top_k == Some(1) || sampling.temperature == 0.0) {
                assert_eq!(b[row], greedy[row], "{vocabulary} {sampling:?}: greedy, by the reference");
            }
            assert!(line.is_none() || a[row] != 2, "{vocabulary} {sampling:?}: a forbidden token");
            // A row samples the same alone.
            let mut counts = counts();
            let (hidden, positions) = (hidden.clone().narrow(0, row, 1), positions.clone().narrow(0, row, 1));
            let alone = SampledRows::new(&rows[row..row + 1], &device);
            let own = read(head_sample(hidden, weight.clone(), &alone, positions, Some(&mut counts)));
            assert_eq!(own, a[row..row + 1], "{vocabulary} {sampling:?}, alone");
        }
        // Products and logarithms differ in the last bits, and a token may be right at a cut.
        let differ = a.iter().zip(&b).filter(|(a, b)| a != b).count();
        let allowed = if B::name(&device).contains("cuda") { 2 } else { 1 };
        assert!(differ <= allowed, "{vocabulary} {spread}: {a:?} {b:?}");
        if differ == 0 {
            assert_close("counts", &ours.written, &theirs.written, 0.0);
            assert_close("counts of the prompts", &ours.prompt, &theirs.prompt, 0.0);
        }
    }
});
