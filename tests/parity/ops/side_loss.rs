//! Side losses against losses that are added.

use burn::backend::Autodiff;
use burn::tensor::Tensor;
use fireclay_kernels::side_loss;

use crate::backend_test;
use crate::compare::{assert_close, random, tolerance};
use crate::harness::{strided, upstream};

backend_test!(a_side_loss_has_the_gradient_of_one_that_is_added::<B>(device) {
    for shape in [[1, 1], [7, 5], [65, 33]] {
        let [x, weight] = [1, 2].map(|seed| strided(random::<B, 2>(seed, shape, &device)));
        // The loss depends on `x` as the output does, and on a parameter alone.
        let gradients = |aside: bool| {
            let [x, weight] = [&x, &weight].map(|x| Tensor::<Autodiff<B>, 2>::from_inner(x.clone()).require_grad());
            let own = (x.clone() * weight.clone()).powi_scalar(2).mean() * 0.7;
            let y = x.clone() * 2.0;
            let y = if aside { side_loss(y, own.clone()) } else { y };
            let loss = (y.clone() * Tensor::from_inner(upstream::<B, 2>(shape, &device))).sum();
            let loss = if aside { loss } else { loss + own };
            let gradients = loss.backward();
            [x, weight].map(|x| x.grad(&gradients).expect("a gradient"))
        };
        let (ours, wanted) = (gradients(true), gradients(false));
        for (ours, wanted) in ours.iter().zip(&wanted) {
            assert_close(&format!("side loss of {shape:?}"), ours, wanted, tolerance::<B>(&device));
        }
        let same = side_loss(x.clone(), Tensor::<B, 1>::ones([1], &device));
        assert_close("what passes a side loss", &same, &x, 0.0);
        let frozen = Tensor::<Autodiff<B>, 2>::from_inner(x.clone());
        let same = side_loss(frozen, Tensor::ones([1], &device)).inner();
        assert_close("what passes a side loss that nothing tracks", &same, &x, 0.0);
    }
});

backend_test!(a_side_loss_alone_reaches_its_parameters::<B>(device) {
    let x = random::<B, 2>(1, [3, 4], &device);
    let weight = Tensor::<Autodiff<B>, 2>::from_inner(random(2, [3, 4], &device)).require_grad();
    let y = side_loss(Tensor::from_inner(x), weight.clone().powi_scalar(2).sum());
    let gradients = (y * 5.0).sum().backward();
    let gradient = weight.grad(&gradients).expect("a gradient");
    assert_close("the gradient", &gradient, &(weight.inner() * 2.0), tolerance::<B>(&device));
});
