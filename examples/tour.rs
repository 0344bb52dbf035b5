//! A tour of the library: tensors, gradients, an attention plot, a transformer.
//!
//! `cargo run --release --example tour` writes `attention.svg` into `target/`.

use std::path::Path;

use burn::backend::{Autodiff, NdArray};
use burn::tensor::{Distribution, Int, Tensor};
use fireclay::Failure;
use fireclay::plots::attention_map;
use fireclay_kernels::{AttentionMask, AttentionOptions, Norm, attention_weights, norm};
use fireclay_model::TransformerConfig;

type B = Autodiff<NdArray>;

fn main() -> Result<(), Failure> {
    let device = Default::default();

    // Tensors are Burn's, and so are gradients.
    let x = Tensor::<B, 2>::from_data([[1.0, -2.0], [3.0, 0.5]], &device).require_grad();
    let gradients = x.clone().powi_scalar(2).sum().backward();
    println!("the gradient of a sum of squares is 2x: {}", x.grad(&gradients).expect("x is tracked"));

    // The operations of a transformer are fused, gradients included.
    let scale = Tensor::<B, 1>::ones([2], &device).require_grad();
    let gradients = norm(x, &Norm::rms(scale.clone(), 1e-6)).sum().backward();
    println!("an RMS norm's gradient of its scale: {}", scale.grad(&gradients).expect("the scale is tracked"));

    // An attention map: queries similar to a key attend to it, and a causal mask hides later
    // tokens.
    let tokens: Vec<String> = ["the", "cat", "saw", "the", "cat"].map(String::from).into();
    let words = Tensor::<B, 2>::random([3, 16], Distribution::Normal(0.0, 1.0), &device);
    let which = Tensor::<B, 1, Int>::from_ints([0, 1, 2, 0, 1], &device);
    let keys = words.select(0, which).reshape([1, 1, 5, 16]);
    let mask = AttentionMask::Causal { window: None };
    let weights = attention_weights(keys.clone(), keys, None, &mask, AttentionOptions::new(16));
    let weights: Vec<f32> = weights.into_data().iter().collect();
    let picture = Path::new("target").join("attention.svg");
    attention_map("each word attends to its like", &tokens, &weights)?.save(&picture)?;
    println!("see {}", picture.display());

    // A transformer is a config: this one is a small Llama.
    let model = TransformerConfig::llama(100, 32, 16, 2, 4).with_n_kv_heads(2).init::<B>(7, &device)?;
    let hidden = model.forward(Tensor::<B, 2, Int>::from_ints([[1, 2, 3], [4, 5, 6]], &device));
    println!("hidden states {:?}, logits {:?}", hidden.dims(), model.logits(hidden).dims());
    Ok(())
}
