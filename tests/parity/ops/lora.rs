//! Projections with low-rank adapters against the reference.

use burn::backend::Autodiff;
use burn::tensor::{DType, Tensor};
use fireclay_kernels::{Activation, ActivationKind, Backend, LoraLayer, lora};

use crate::backend_test;
use crate::compare::{Tolerance, assert_close, random, values};
use crate::harness::{assert_parity, dtype_under_test, halves, is_worth_it, strided, vector, with_gradients};
use crate::plain;

const GATED_SILU: Activation = Activation { kind: ActivationKind::Silu, gated: true };
const GELU: Activation = Activation { kind: ActivationKind::GeluTanh, gated: false };

/// What follows the product.
#[derive(Clone, Copy, Debug)]
struct Parts {
    bias: bool,
    activation: Option<Activation>,
    residual: bool,
}

const PARTS: [Parts; 6] = [
    Parts { bias: false, activation: None, residual: false },
    Parts { bias: true, activation: None, residual: false },
    Parts { bias: false, activation: None, residual: true },
    Parts { bias: true, activation: None, residual: true },
    Parts { bias: false, activation: Some(GATED_SILU), residual: false },
    Parts { bias: true, activation: Some(GELU), residual: false },
];

/// The operands of `[x, a, b, residual, weight, bias]`, in which sums have values of order one, and
/// weight and adapter similar shares of them.
fn inputs<B: Backend>([rows, d_input, d_output, rank]: [usize; 4], device: &B::Device) -> [Tensor<B, 2>; 6] {
    let near = |seed, shape: [usize; 2]| random::<B, 2>(seed, shape, device) * (3.0 / shape[1] as f64).sqrt();
    [
        random(1, [rows, d_input], device),
        near(2, [rank, d_input]),
        near(3, [d_output, rank]),
        random(4, [rows, d_output], device),
        near(5, [d_output, d_input]),
        random(6, [1, d_output], device),
    ]
}

fn layer_of<B: Backend>(i: &[Tensor<B, 2>], parts: Parts) -> (LoraLayer<B>, Option<Tensor<B, 2>>) {
    let layer = LoraLayer {
        weight: i[4].clone().into(),
        bias: parts.bias.then(|| vector(&i[5])),
        a: i[1].clone().into(),
        b: i[2].clone().into(),
        scale: 0.75,
        activation: parts.activation,
    };
    (layer, parts.residual.then(|| i[3].clone()))
}

fn lora_of<B: Backend>(i: &[Tensor<B, 2>], parts: Parts) -> Tensor<B, 2> {
    let (layer, residual) = layer_of(i, parts);
    lora(i[0].clone(), layer, residual)
}

fn plain_lora_of<B: Backend>(i: &[Tensor<B, 2>], parts: Parts) -> Tensor<B, 2> {
    let (layer, residual) = layer_of(i, parts);
    plain::lora(i[0].clone(), layer, residual)
}

/// The inputs that have a gradient: the frozen ones only if they are `trained`.
fn tracked<B: Backend>(inputs: &[Tensor<B, 2>; 6], parts: Parts, trained: bool) -> Vec<usize> {
    let used = [true, true, true, parts.residual, trained, trained && parts.bias];
    (0..inputs.len()).filter(|at| used[*at]).collect()
}

/// All inputs, of which those in `at` are these.
fn all<B: Backend>(
    inputs: &[Tensor<B, 2>; 6],
    at: &[usize],
    tracked: &[Tensor<Autodiff<B>, 2>],
) -> Vec<Tensor<Autodiff<B>, 2>> {
    let mut all: Vec<_> = inputs.iter().map(|x| Tensor::from_inner(x.clone().cast(tracked[0].dtype()))).collect();
    at.iter().zip(tracked).for_each(|(at, x)| all[*at] = x.clone());
    all
}

backend_test!(projections_with_adapters_match_the_reference::<B>(device) {
    for sizes in [[1, 1, 2, 1], [2, 3, 4, 3], [65, 63, 64, 5], [130, 17, 34, 48], [33, 64, 66, 8], [300, 40, 72, 16]] {
        // Frozen inputs are not among those that the harness rounds.
        let dtype = dtype_under_test::<B>(&device);
        let rounded = inputs::<B>(sizes, &device).map(|x| x.cast(dtype).cast(DType::F32));
        let [x, a, b, residual, weight, bias] = rounded;
        let plain_strides = [x.clone(), a.clone(), b.clone(), residual.clone(), weight.clone(), bias.clone()];
        let other_strides = [strided(x), strided(a), strided(b), strided(residual), strided(weight), bias];
        for inputs in [plain_strides, other_strides] {
            for parts in PARTS {
                for trained in [false, true] {
                    let at = tracked(&inputs, parts, trained);
                    let given: Vec<_> = at.iter().map(|at| inputs[*at].clone()).collect();
                    assert_parity(
                        &format!("lora {sizes:?}, {parts:?}, trained weight {trained}"),
                        &given,
                        |i| lora_of(&all(&inputs, &at, i), parts),
                        |i| plain_lora_of(&all(&inputs, &at, i), parts),
                    );
                }
            }
        }
    }
});

backend_test!(projections_with_adapters_in_half_precision_are_close_to_the_reference::<B>(device) {
    // Few rows; whole tiles of both products, tiles that are cut along the inner dimension or at
    // edges; ranks of less than a stage, a stage and more, and one that TMA does not read; and narrow
    // products that read their other side once.
    let sizes = [
        [70, 136, 264, 16],
        [1024, 512, 768, 16],
        [1000, 520, 648, 24],
        [4096, 136, 2048, 48],
        [2056, 768, 1024, 64],
        [1300, 1288, 640, 136],
        [1000, 520, 640, 5],
        [8192, 1024, 1280, 32],
        [16_384, 1024, 1024, 16],
    ];
    let sizes = sizes.into_iter().filter(|sizes| is_worth_it::<B>(&device, &sizes[..3]));
    let halves = halves::<B>(&device);
    for (half, sizes) in sizes.flat_map(|sizes| halves.iter().map(move |half| (*half, sizes))) {
        let rounded = inputs::<B>(sizes, &device).map(|x| x.cast(half).cast(DType::F32));
        for parts in PARTS {
            let what = format!("{half:?} lora {sizes:?}, {parts:?}");
            let at = tracked(&rounded, parts, false);
            let given: Vec<_> = at.iter().map(|at| rounded[*at].clone()).collect();
            let ours = || with_gradients(&given, half, |i| lora_of(&all(&rounded, &at, i), parts));
            let (output, gradients) = ours();
            let (wanted, wanted_gradients) =
                with_gradients(&given, DType::F32, |i| plain_lora_of(&all(&rounded, &at, i), parts));
            assert_close(&what, &output, &wanted, Tolerance::new(1e-2, half));
            let without = lora_of(&rounded.clone().map(|x| x.cast(half)), parts);
            assert_close(&format!("{what}, without a graph"), &without, &wanted, Tolerance::new(1e-2, half));
            let (again, gradients_again) = ours();
            assert_eq!(values(&output), values(&again), "{what}: the same bits again");
            for (index, (gradient, wanted)) in gradients.iter().zip(&wanted_gradients).enumerate() {
                let what = format!("{what}, gradient of input {}", at[index]);
                assert_close(&what, gradient, wanted, Tolerance::new(2e-2, half));
                assert_eq!(values(gradient), values(&gradients_again[index]), "{what}: the same bits again");
            }
        }
    }
});
