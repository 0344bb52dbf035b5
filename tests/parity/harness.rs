//! Shared parts of the operations' tests: strided inputs, dtypes, and comparison with the
//! reference.

use burn::backend::Autodiff;
use burn::tensor::{DType, FloatDType, Int, Tensor, TensorData};
use fireclay_kernels::Backend;

use crate::compare::{Tolerance, assert_close, random, tolerance};
use crate::skip::skip;

/// The same values with the strides of a transposed tensor.
pub(crate) fn strided<B: Backend, const D: usize>(x: Tensor<B, D>) -> Tensor<B, D> {
    let mut order: Vec<isize> = (0..D as isize).collect();
    order.swap(D - 2, D - 1);
    let order: [isize; D] = order.try_into().expect("D axes");
    let dims = x.dims();
    // Through the host, since a lazy backend might undo the transposition.
    let swapped = x.permute(order).into_data();
    let swapped = Tensor::<B, D>::from_data(swapped, &Default::default()).permute(order);
    assert_eq!(swapped.dims(), dims);
    swapped
}

/// An upstream gradient: values of order one of either sign, none near zero, also for a single
/// value.
pub(crate) fn upstream<B: Backend, const D: usize>(shape: [usize; D], device: &B::Device) -> Tensor<B, D> {
    let x = random::<B, D>(99, shape, device);
    x.clone() + x.sign() * 0.5
}

/// The output, then the gradient of each input for an upstream gradient of order one, all in f32;
/// computed in `dtype`.
pub(crate) fn with_gradients<B: Backend, const D: usize, const O: usize>(
    inputs: &[Tensor<B, D>],
    dtype: DType,
    f: impl Fn(&[Tensor<Autodiff<B>, D>]) -> Tensor<Autodiff<B>, O>,
) -> (Tensor<B, O>, Vec<Tensor<B, D>>) {
    let inputs: Vec<_> =
        inputs.iter().map(|x| Tensor::<Autodiff<B>, D>::from_inner(x.clone().cast(dtype)).require_grad()).collect();
    let output = f(&inputs);
    let upstream = upstream::<B, O>(output.dims(), &output.device()).cast(output.dtype());
    let gradients = (output.clone() * Tensor::from_inner(upstream)).sum().backward();
    let gradient = |x: &Tensor<Autodiff<B>, D>| x.grad(&gradients).expect("a gradient").cast(DType::F32);
    (output.inner().cast(DType::F32), inputs.iter().map(gradient).collect())
}

/// The tolerance of results in the dtype under test.
pub(crate) fn tolerance_under_test<B: Backend>(device: &B::Device) -> Tolerance {
    match dtype_under_test::<B>(device) {
        DType::F32 => tolerance::<B>(device),
        half => Tolerance::new(2e-2, half),
    }
}

/// Compares our operation in the dtype under test with the reference in f32, for the same inputs.
#[track_caller]
pub(crate) fn assert_parity<B: Backend, const D: usize, const O: usize>(
    what: &str,
    inputs: &[Tensor<B, D>],
    ours: impl Fn(&[Tensor<Autodiff<B>, D>]) -> Tensor<Autodiff<B>, O>,
    theirs: impl Fn(&[Tensor<Autodiff<B>, D>]) -> Tensor<Autodiff<B>, O>,
) {
    let tolerance = tolerance_under_test::<B>(&inputs[0].device());
    assert_parity_within(tolerance, what, inputs, ours, theirs);
}

/// [`assert_parity`], with a given tolerance.
#[track_caller]
pub(crate) fn assert_parity_within<B: Backend, const D: usize, const O: usize>(
    tolerance: Tolerance,
    what: &str,
    inputs: &[Tensor<B, D>],
    ours: impl Fn(&[Tensor<Autodiff<B>, D>]) -> Tensor<Autodiff<B>, O>,
    theirs: impl Fn(&[Tensor<Autodiff<B>, D>]) -> Tensor<Autodiff<B>, O>,
) {
    let dtype = dtype_under_test::<B>(&inputs[0].device());
    let (output, gradients) = with_gradients(inputs, dtype, ours);
    let rounded: Vec<_> = inputs.iter().map(|x| x.clone().cast(dtype)).collect();
    let (wanted, wanted_gradients) = with_gradients(&rounded, DType::F32, theirs);
    assert_close(what, &output, &wanted, tolerance);
    for (at, (gradient, wanted)) in gradients.iter().zip(&wanted_gradients).enumerate() {
        assert_close(&format!("{what}, gradient of input {at}"), gradient, wanted, tolerance);
    }
}

/// Whether to test products of these sizes: large ones have separate kernels on tensor cores, and
/// elsewhere only take long.
pub(crate) fn is_worth_it<B: Backend>(device: &B::Device, sizes: &[usize]) -> bool {
    B::name(device).contains("cuda") || sizes.iter().product::<usize>() < 1 << 28
}

/// bf16 if the device supports it, else f32.
pub(crate) fn half_or_single<B: Backend>(device: &B::Device) -> DType {
    if B::supports_dtype(device, DType::BF16) { DType::BF16 } else { DType::F32 }
}

/// The dtype named by `FIRECLAY_TEST_DTYPE`, f32 by default; an unsupported one fails the tests.
/// Logs that it was used: `tests/gpu.sh` only runs a test in each dtype if its result depends on
/// it.
pub(crate) fn dtype_under_test<B: Backend>(device: &B::Device) -> DType {
    let dtype = match std::env::var("FIRECLAY_TEST_DTYPE").as_deref() {
        Err(_) | Ok("f32") => DType::F32,
        Ok("bf16") => DType::BF16,
        Ok("f16") => DType::F16,
        Ok(other) => panic!("FIRECLAY_TEST_DTYPE is f32, bf16 or f16, not {other}"),
    };
    eprintln!("dtype under test: {dtype:?}");
    assert!(dtype == DType::F32 || B::supports_dtype(device, dtype), "{} has no {dtype:?}", B::name(device));
    dtype
}

/// `[1, width]` as `[width]`, so that weights fit in one list with their input.
pub(crate) fn vector<B: Backend>(x: &Tensor<B, 2>) -> Tensor<B, 1> {
    x.clone().flatten(0, 1)
}

pub(crate) fn integers<B: Backend, const D: usize>(
    data: Vec<i32>,
    shape: [usize; D],
    device: &B::Device,
) -> Tensor<B, D, Int> {
    Tensor::from_data(TensorData::new(data, shape), device)
}

/// The 16-bit dtypes that the device supports; others are skipped.
pub(crate) fn halves<B: Backend>(device: &B::Device) -> Vec<DType> {
    let has = |dtype: &DType| {
        let has = B::supports_dtype(device, *dtype);
        if !has {
            skip(&format!("{} has no {dtype:?}", B::name(device)));
        }
        has
    };
    [DType::BF16, DType::F16].into_iter().filter(has).collect()
}

/// The supported dtypes of weights and activations, with their tolerances.
pub(crate) fn dtypes<B: Backend>(device: &B::Device) -> Vec<(FloatDType, Tolerance)> {
    let single = (FloatDType::F32, tolerance::<B>(device));
    if !B::name(device).contains("cuda") {
        skip(&format!("decoding in 16 bits is for CUDA, and this is {}", B::name(device)));
        return vec![single];
    }
    let half =
        |dtype: DType| (FloatDType::from(dtype), Tolerance::new(if dtype == DType::BF16 { 2e-2 } else { 4e-3 }, dtype));
    std::iter::once(single).chain(halves::<B>(device).into_iter().map(half)).collect()
}
