//! Host memory of a training step with checkpoints, and its gradients.

use burn::backend::{Autodiff, NdArray};
use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::{Int, Tensor, TensorData};
use fireclay_kernels::HeadLossOptions;
use fireclay_model::{Transformer, TransformerConfig};
use peak_alloc::PeakAlloc;

#[global_allocator]
static ALLOCATED: PeakAlloc = PeakAlloc;

type B = Autodiff<NdArray>;
type Gradients = <B as AutodiffBackend>::Gradients;

/// The gradients of a model's parameters; none for those without one.
fn by_parameter(model: &Transformer<B>, gradients: Gradients) -> Vec<Vec<f32>> {
    struct Taker {
        gradients: Gradients,
        taken: Vec<Vec<f32>>,
    }
    impl ModuleVisitor<B> for Taker {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
            let gradient = param.val().grad_remove(&mut self.gradients);
            self.taken.push(gradient.map_or_else(Vec::new, |gradient| gradient.into_data().to_vec().expect("f32")));
        }
    }
    let mut taker = Taker { gradients, taken: Vec::new() };
    model.visit(&mut taker);
    taker.taken
}

#[test]
fn blocks_are_trained_with_checkpoints_where_the_embedding_is_not() {
    let device = Default::default();
    let mut model: Transformer<B> = TransformerConfig::llama(50, 16, 16, 3, 2).init(1, &device).expect("a model");
    model.embedding = model.embedding.no_grad();
    let ids = || Tensor::<B, 2, Int>::from_ints([[1, 2, 3], [4, 5, 6]], &device);
    let (hidden, checkpoints) = model.forward_with_checkpoints(ids(), 1);
    let loss = model.loss(hidden, ids(), HeadLossOptions::new());
    let gradients = model.backward(loss, checkpoints, None, || {});
    let without: Vec<bool> = by_parameter(&model, gradients).iter().map(Vec::is_empty).collect();
    assert!(without[0] && !without[1..].contains(&true), "none of the embedding alone: {without:?}");
}

#[test]
fn checkpoints_take_a_fraction_of_the_memory_and_give_the_same_gradients() {
    let device = Default::default();
    let config = TransformerConfig::llama(50, 256, 64, 12, 4).with_tied_embeddings(true);
    let model: Transformer<B> = config.init(1, &device).expect("a model");
    let ids = |shift: i64| {
        let ids: Vec<i64> = (0..2 * 256).map(|at| (at * at + shift) % 50).collect();
        Tensor::<B, 2, Int>::from_data(TensorData::new(ids, [2, 256]), &device)
    };
    let step = |every: usize| {
        ALLOCATED.reset_peak_usage();
        let before = ALLOCATED.current_usage();
        let loss = |hidden| model.loss(hidden, ids(7), HeadLossOptions::new());
        let gradients = if every == 0 {
            loss(model.forward(ids(0))).backward()
        } else {
            let (hidden, checkpoints) = model.forward_with_checkpoints(ids(0), every);
            let mut again = 0;
            let gradients = model.backward(loss(hidden), checkpoints, None, || again += 1);
            assert_eq!(again, 12usize.div_ceil(every) - 1, "all but the last blocks");
            gradients
        };
        (by_parameter(&model, gradients), ALLOCATED.peak_usage() - before)
    };
    step(0);
    let (kept, all) = step(0);
    assert!(kept.iter().all(|gradient| gradient.iter().any(|value| *value != 0.0)), "gradients of all parameters");
    for every in [1, 3, 5] {
        let (again, less) = step(every);
        for (again, kept) in again.iter().zip(&kept) {
            let scale = kept.iter().fold(0.0f32, |most, value| most.max(value.abs()));
            let off = again.iter().zip(kept).fold(0.0f32, |most, (a, b)| most.max((a - b).abs()));
            assert!(again.len() == kept.len() && off <= 1e-5 * scale, "{off} of {scale}");
        }
        println!("every {every}: {less} bytes of {all}");
        assert!(every > 3 || less < all / 2, "every {every}: {less} bytes of {all}");
    }
}
