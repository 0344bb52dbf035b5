//! Mixtures of experts against dense layers with masked sums.

use burn::backend::Autodiff;
use burn::tensor::{DType, ElementConversion, Int, Tensor};
use fireclay_kernels::{
    Activation, ActivationKind, Backend, ExpertsLayer, Format, RandomKey, Weight, choose_experts, expert_loads, experts,
};

use crate::backend_test;
use crate::compare::{Tolerance, assert_close, random, tolerance};
use crate::formats::matrix;
use crate::harness::{
    assert_parity, assert_parity_within, dtype_under_test, halves, integers, strided, tolerance_under_test, vector,
    with_gradients,
};
use crate::plain;

const SWIGLU: Activation = Activation { kind: ActivationKind::Silu, gated: true };

/// Sizes of a mixture.
#[derive(Clone, Copy, Debug)]
struct Case {
    tokens: usize,
    d_model: usize,
    d_ff: usize,
    n_experts: usize,
    k: usize,
    activation: Activation,
    limit: Option<f64>,
}

const fn case([tokens, d_model, d_ff, n_experts, k]: [usize; 5], activation: Activation, limit: Option<f64>) -> Case {
    Case { tokens, d_model, d_ff, n_experts, k, activation, limit }
}

/// Which experts tokens choose.
#[derive(Clone, Copy, Debug)]
enum Routing {
    /// Any, but never the second.
    Random,
    /// All the same.
    One,
    /// Also experts that do not exist, which count as the last.
    Beyond,
}

impl Routing {
    fn chosen(self, case: Case) -> Vec<i32> {
        let Case { tokens, n_experts, k, .. } = case;
        let key = RandomKey::new(7);
        let chosen = |token: usize| {
            let first = (key.uniform(token as u32, 0) * n_experts as f64) as usize;
            (0..k).map(move |i| match self {
                Self::Random => match (first + i) % n_experts {
                    1 => (first + k) % n_experts,
                    expert => expert,
                },
                Self::One => (n_experts / 2 + i) % n_experts,
                Self::Beyond => (first + i) % n_experts * 3,
            } as i32)
        };
        let mut all: Vec<i32> = (0..tokens).flat_map(chosen).collect();
        match self {
            Self::Random if n_experts > 2 => {
                all.iter_mut().filter(|expert| **expert == 1).for_each(|expert| *expert = 2)
            }
            Self::Beyond => all[0] = -1,
            _ => {}
        }
        all
    }
}

/// `[x, weights, up, down, up's bias, down's bias]`.
fn inputs<B: Backend>(case: Case, device: &B::Device) -> [Tensor<B, 2>; 6] {
    let Case { tokens, d_model, d_ff, n_experts, k, activation, .. } = case;
    let width = if activation.gated { 2 * d_ff } else { d_ff };
    let near = |seed, shape: [usize; 2]| random::<B, 2>(seed, shape, device) * (3.0 / shape[1] as f64).sqrt();
    [
        random(1, [tokens, d_model], device),
        random::<B, 2>(2, [tokens, k], device) * 0.5 + 0.75,
        near(3, [n_experts * width, d_model]),
        near(4, [n_experts * d_model, d_ff]),
        random(5, [1, n_experts * width], device),
        random(6, [1, n_experts * d_model], device),
    ]
}

fn experts_of<B: Backend>(i: &[Tensor<B, 2>], chosen: &Tensor<B, 2, Int>, case: Case, biased: bool) -> Tensor<B, 2> {
    let bias = |bias: &Tensor<B, 2>| biased.then(|| vector(bias));
    let layer = ExpertsLayer {
        up: i[2].clone().into(),
        up_bias: bias(&i[4]),
        activation: case.activation,
        limit: case.limit,
        down: i[3].clone().into(),
        down_bias: bias(&i[5]),
    };
    experts(i[0].clone(), chosen.clone(), i[1].clone(), layer)
}

/// The same, with every expert applied to every token. Sums that are stored as `dtype` are rounded to
/// it: clamping decides by these.
fn plain_experts_of<B: Backend>(
    i: &[Tensor<B, 2>],
    chosen: &Tensor<B, 2, Int>,
    case: Case,
    dtype: DType,
    biased: bool,
) -> Tensor<B, 2> {
    let Case { tokens, d_model, n_experts, limit, activation, .. } = case;
    let width = i[2].dims()[0] / n_experts;
    let chosen = chosen.clone();
    let last = n_experts as i32 - 1;
    let outside = chosen.clone().lower_elem(0).bool_or(chosen.clone().greater_elem(last));
    let chosen = chosen.mask_fill(outside, last);
    let mut sum = i[0].zeros_like();
    for expert in 0..n_experts {
        let rows = |at: usize, rows: usize| i[at].clone().narrow(0, expert * rows, rows);
        let bias = |at: usize, size: usize| biased.then(|| vector(&i[at].clone().narrow(1, expert * size, size)));
        let inner = exact_linear(i[0].clone(), rows(2, width), bias(4, width));
        let mut inner = inner.cast(dtype).cast(DType::F32);
        if let Some(limit) = limit {
            let [gate, up] = [0, width / 2].map(|first| inner.clone().narrow(1, first, width / 2));
            inner = Tensor::cat(vec![gate.clamp_max(limit), up.clamp(-limit, limit) + 1.0], 1);
        }
        let output = exact_linear(plain::activate(inner, activation), rows(3, d_model), bias(5, d_model));
        let share = i[1].clone().mask_fill(chosen.clone().not_equal_elem(expert as i32), 0.0).sum_dim(1);
        sum = sum + output * share.expand([tokens, d_model]);
    }
    sum
}

/// A product in f32 on every backend: Burn's would be rounded to TF32 on CUDA, twice in a row here.
fn exact_linear<B: Backend>(x: Tensor<B, 2>, weight: Tensor<B, 2>, bias: Option<Tensor<B, 1>>) -> Tensor<B, 2> {
    let product = (x.unsqueeze_dim::<3>(1) * weight.unsqueeze_dim::<3>(0)).sum_dim(2).squeeze_dim(2);
    match bias {
        Some(bias) => product + bias.unsqueeze(),
        None => product,
    }
}

fn assert_case<B: Backend>(case: Case, routing: Routing, device: &B::Device) {
    let all = inputs::<B>(case, device);
    let [x, weights, up, down, up_bias, down_bias] = all;
    let all = [strided(x), strided(weights), strided(up), strided(down), up_bias, down_bias];
    let chosen = integers::<Autodiff<B>, 2>(routing.chosen(case), [case.tokens, case.k], device);
    let what = format!("experts {case:?}, {routing:?}");
    let tolerance = tolerance_under_test::<B>(device);
    let dtype = dtype_under_test::<B>(device);
    assert_parity_within(
        tolerance,
        &what,
        &all,
        |i| experts_of(i, &chosen, case, true),
        |i| plain_experts_of(i, &chosen, case, dtype, true),
    );
    let fixed = [&all[4], &all[5]].map(|x| Tensor::<Autodiff<B>, 2>::from_inner(x.clone()));
    let with_fixed = |i: &[Tensor<Autodiff<B>, 2>]| [i, &fixed[..]].concat();
    assert_parity_within(
        tolerance,
        &format!("{what}, without biases"),
        &all[..4],
        |i| experts_of(&with_fixed(i), &chosen, case, false),
        |i| plain_experts_of(&with_fixed(i), &chosen, case, dtype, false),
    );
}

backend_test!(experts_match_dense_layers_with_masked_sums::<B>(device) {
    for case in [
        case([1, 3, 5, 2, 1], SWIGLU, None),
        case([7, 18, 12, 5, 2], SWIGLU, None),
        case([33, 20, 11, 3, 3], Activation::plain(ActivationKind::GeluTanh), None),
        // Clamping is a decision: few values are so near the limit that rounding matters.
        case([70, 24, 33, 4, 2], Activation { kind: ActivationKind::QuickGelu, gated: true }, Some(1.5)),
    ] {
        for routing in [Routing::Random, Routing::One, Routing::Beyond] {
            assert_case::<B>(case, routing, &device);
        }
    }
});

backend_test!(experts_with_many_tokens_match_dense_layers::<B>(device) {
    // Several tiles of rows per expert, also of columns, and more slots than the sort has in a chunk.
    for (sizes, routing) in [
        ([300, 68, 37, 4, 2], Routing::Random),
        ([290, 36, 70, 5, 2], Routing::One),
        ([1100, 9, 6, 3, 2], Routing::Random),
        ([40, 12, 8, 300, 4], Routing::Random),
    ] {
        assert_case::<B>(case(sizes, SWIGLU, None), routing, &device);
    }
});

/// Output and gradients in half precision, compared with dense layers in f32, and computed again; and
/// the output without a graph. Weights and biases of routers are f32 in training: `mixed`.
fn assert_half_case<B: Backend>(half: DType, case: Case, routing: Routing, mixed: bool, device: &B::Device) {
    let all = inputs::<B>(case, device).map(|x| x.cast(half));
    let chosen = integers::<Autodiff<B>, 2>(routing.chosen(case), [case.tokens, case.k], device);
    let of = |i: &[Tensor<Autodiff<B>, 2>]| {
        let at =
            |at: usize| if mixed && [1, 4, 5].contains(&at) { i[at].clone().cast(DType::F32) } else { i[at].clone() };
        experts_of(&std::array::from_fn::<_, 6, _>(at), &chosen, case, true)
    };
    let ours = || with_gradients(&all, half, of);
    let (output, gradients) = ours();
    let (wanted, wanted_gradients) =
        with_gradients(&all, DType::F32, |i| plain_experts_of(i, &chosen, case, half, true));
    let (again, gradients_again) = ours();
    let what = format!("experts {case:?}, {routing:?}, {half:?}, weights and biases in f32 {mixed}");
    let within = Tolerance::new(2e-2, half);
    assert_close(&what, &output, &wanted, within);
    assert_close(&format!("{what}, again"), &again, &output, 0.0);
    let without = experts_of(&all, &chosen.clone().inner(), case, true);
    assert_close(&format!("{what}, without a graph"), &without, &wanted, within);
    for (at, (gradient, wanted)) in gradients.iter().zip(&wanted_gradients).enumerate() {
        let what = format!("{what}, gradient of input {at}");
        // A row per expert, so that one wrong element of a bias is noticed.
        let [rows, columns] = gradient.dims();
        let rows = if rows == 1 { case.n_experts } else { rows };
        let by_rows = |x: &Tensor<B, 2>| x.clone().reshape([rows, gradient.shape().num_elements() / rows]);
        assert_close(&what, &by_rows(gradient), &by_rows(wanted), within);
        assert_close(&format!("{what}, again"), gradient, &gradients_again[at], 0.0);
        let per_expert = rows / case.n_experts;
        for expert in (0..case.n_experts).filter(|expert| at > 1 && !is_chosen(*expert, case, routing)) {
            let own = by_rows(gradient).narrow(0, expert * per_expert, per_expert);
            let largest = own.abs().max().into_scalar().elem::<f32>();
            assert_eq!(largest, 0.0, "{what} of {columns} columns, expert {expert}, which no token chose");
        }
    }
}

/// Whether a token chooses the expert; those that do not exist are the last.
fn is_chosen(expert: usize, case: Case, routing: Routing) -> bool {
    let last = case.n_experts - 1;
    routing.chosen(case).into_iter().any(|chosen| usize::try_from(chosen).unwrap_or(last).min(last) == expert)
}

backend_test!(experts_in_half_precision_are_close_to_dense_layers_and_repeat_their_bits::<B>(device) {
    for half in halves::<B>(&device) {
        for (sizes, mixed) in [([5, 64, 32, 8, 2], false), ([300, 136, 72, 4, 2], false), ([330, 72, 40, 3, 2], true)] {
            assert_half_case::<B>(half, case(sizes, SWIGLU, None), Routing::Random, mixed, &device);
        }
    }
});

backend_test!(experts_of_few_and_many_rows_in_half_precision_are_close_to_dense_layers::<B>(device) {
    // Hopper's tiles have 256 rows, 128 of a block, 64 of a consumer, and 64 of the inner dimension: an
    // expert with all tokens, others with none, tails of each, and more columns than one tile has.
    let quick = Activation { kind: ActivationKind::QuickGelu, gated: true };
    for (sizes, activation, limit, routing) in [
        ([390, 72, 136, 3, 1], Activation::plain(ActivationKind::GeluTanh), None, Routing::One),
        // Without a graph this has more slots than the kernel for few tokens takes.
        ([330, 64, 200, 5, 2], quick, Some(1.5), Routing::Random),
        ([150, 264, 24, 3, 2], SWIGLU, None, Routing::Beyond),
        ([130, 80, 40, 40, 3], Activation::plain(ActivationKind::Relu), None, Routing::Random),
        // This one has no number in the kernels.
        ([70, 72, 64, 4, 2], Activation::plain(ActivationKind::ReluSquared), None, Routing::Random),
    ] {
        for half in halves::<B>(&device) {
            assert_half_case::<B>(half, case(sizes, activation, limit), routing, false, &device);
        }
    }
});

// Without gradients, as in decoding: kernels for few tokens sort the slots themselves.
backend_test!(experts_of_few_tokens_match_dense_layers_and_repeat_their_bits::<B>(device) {
    let dtype = dtype_under_test::<B>(&device);
    let oss = Activation { kind: ActivationKind::QuickGelu, gated: true };
    for (sizes, activation, limit) in [
        ([1, 64, 24, 5, 2], SWIGLU, None),
        ([5, 40, 16, 300, 3], SWIGLU, None),
        ([32, 72, 48, 128, 8], SWIGLU, None),
        ([8, 1048, 32, 3, 2], oss, Some(1.5)),
        ([20, 32, 304, 40, 4], Activation::plain(ActivationKind::GeluTanh), None),
        // An expert with more slots than are multiplied at a time, and rows that are no whole loads.
        ([19, 8, 8, 16, 3], SWIGLU, None),
        ([7, 12, 9, 4, 2], SWIGLU, None),
    ] {
        let case = case(sizes, activation, limit);
        for (routing, biased) in [(Routing::Random, true), (Routing::One, false), (Routing::Beyond, true)] {
            let all = inputs::<B>(case, &device).map(|x| x.cast(dtype));
            let [x, weights, up, down, up_bias, down_bias] = all;
            let all = [strided(x), strided(weights), up, down, up_bias, down_bias];
            let chosen = integers::<B, 2>(routing.chosen(case), [case.tokens, case.k], &device);
            let output = experts_of(&all, &chosen, case, biased);
            let wanted = plain_experts_of(&all.clone().map(|x| x.cast(DType::F32)), &chosen, case, dtype, biased);
            let what = format!("experts {case:?}, {routing:?}");
            assert_close(&what, &output, &wanted.cast(dtype), tolerance_under_test::<B>(&device));
            assert_close(&what, &experts_of(&all, &chosen, case, biased), &output, 0.0);
        }
    }
});

backend_test!(quantized_experts_are_their_floats_in_every_format::<B>(device) {
    for format in Format::ALL {
        for (tokens, n_experts, columns) in [(3, 4, 256), (80, 3, 512)] {
            let (d_model, d_ff, k) = (columns, columns / 2 * 2, 2);
            let Some(up) = matrix::<B>(format, 3, [n_experts * 2 * d_ff, d_model], 0.1, &device) else { continue };
            let Some(down) = matrix::<B>(format, 4, [n_experts * d_model, d_ff], 0.1, &device) else { continue };
            let case = case([tokens, d_model, d_ff, n_experts, k], SWIGLU, None);
            let chosen = integers::<Autodiff<B>, 2>(Routing::Random.chosen(case), [tokens, k], &device);
            let x = random::<B, 2>(1, [tokens, d_model], &device);
            let weights = Tensor::<Autodiff<B>, 2>::from_inner(random::<B, 2>(2, [tokens, k], &device) + 1.0);
            let layer = |[up, down]: [Weight<Autodiff<B>>; 2]| ExpertsLayer {
                up, up_bias: None, activation: SWIGLU, limit: None, down, down_bias: None,
            };
            let stored = [&up, &down].map(|weight| Weight::Quantized(weight.clone().tracked()));
            let floats = [&up, &down].map(|weight| {
                let floats = plain::dequantize(weight, burn::tensor::FloatDType::F32);
                Weight::Float(Tensor::<Autodiff<B>, 2>::from_inner(floats))
            });
            assert_parity(
                &format!("experts in {format:?}"),
                &[x],
                |i| experts(i[0].clone(), chosen.clone(), weights.clone().cast(i[0].dtype()), layer(stored.clone())),
                |i| experts(i[0].clone(), chosen.clone(), weights.clone(), layer(floats.clone())),
            );
        }
    }
});

backend_test!(decoding_with_quantized_experts_is_close_to_their_floats::<B>(device) {
    for format in Format::ALL {
        let (tokens, n_experts, columns, k) = (5, 4, 256, 2);
        let Some(up) = matrix::<B>(format, 3, [n_experts * 2 * columns, columns], 0.1, &device) else { continue };
        let Some(down) = matrix::<B>(format, 4, [n_experts * columns, columns], 0.1, &device) else { continue };
        let case = case([tokens, columns, columns, n_experts, k], SWIGLU, None);
        let chosen = integers::<B, 2>(Routing::Random.chosen(case), [tokens, k], &device);
        let x = random::<B, 2>(1, [tokens, columns], &device);
        let weights = random::<B, 2>(2, [tokens, k], &device) + 1.0;
        let of = |[up, down]: [Weight<B>; 2]| {
            let layer = ExpertsLayer { up, up_bias: None, activation: SWIGLU, limit: None, down, down_bias: None };
            experts(x.clone(), chosen.clone(), weights.clone(), layer)
        };
        let floats = [&up, &down].map(|weight| plain::dequantize(weight, burn::tensor::FloatDType::F32).into());
        // Inputs may be rounded to bytes.
        let within = if format.rounds_inputs() { Tolerance::new(3e-2, DType::F32) } else { tolerance::<B>(&device) };
        assert_close(&format!("experts in {format:?}"), &of([up.into(), down.into()]), &of(floats), within);
    }
});

backend_test!(the_best_experts_are_chosen_in_order_and_of_equal_ones_the_first::<B>(device) {
    for [tokens, n_experts, k] in [[1, 1, 1], [3, 5, 2], [70, 8, 8], [33, 130, 6], [9, 1000, 3]] {
        // Few values, so that many are equal; some experts are switched off.
        let scores = (random::<B, 2>(3, [tokens, n_experts], &device) * 6.0).round();
        let off = scores.clone().greater_elem(if tokens == 70 { -2.0 } else { 4.0 });
        let scores = scores.mask_fill(off, f32::NEG_INFINITY);
        let chosen = choose_experts(strided(scores.clone()), k);
        assert_eq!(chosen.dims(), [tokens, k]);
        let chosen: Vec<i64> = chosen.into_data().iter::<i64>().collect();
        let scores: Vec<f32> = scores.into_data().iter::<f32>().collect();
        for (scores, chosen) in scores.chunks_exact(n_experts).zip(chosen.chunks_exact(k)) {
            let mut order: Vec<i64> = (0..n_experts as i64).collect();
            order.sort_by(|a, b| scores[*b as usize].partial_cmp(&scores[*a as usize]).expect("numbers"));
            assert_eq!(chosen, &order[..k], "of {scores:?}");
        }
    }
});

backend_test!(loads_are_the_numbers_of_choices::<B>(device) {
    for sizes in [[1, 3, 5, 2, 1], [1100, 9, 6, 3, 2]] {
        let case = case(sizes, SWIGLU, None);
        let chosen = Routing::Beyond.chosen(case);
        let mut wanted = vec![0.0f32; case.n_experts];
        let last = case.n_experts - 1;
        chosen.iter().for_each(|expert| wanted[usize::try_from(*expert).unwrap_or(last).min(last)] += 1.0);
        let loads = expert_loads(integers::<B, 2>(chosen, [case.tokens, case.k], &device), case.n_experts);
        assert_eq!(loads.into_data().iter::<f32>().collect::<Vec<_>>(), wanted);
    }
});
