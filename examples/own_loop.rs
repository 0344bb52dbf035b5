//! A training loop of your own, from the crates: `cargo run --release --example own_loop`.
//!
//! A small Llama learns to count in words, and then counts.

use burn::backend::{Autodiff, NdArray};
use burn::module::AutodiffModule;
use fireclay::Failure;
use fireclay::tasks::language;
use fireclay::training::optimizer::{Optimizer, ParameterGradients};
use fireclay_datasets::{Corpus, TextCorpus, Tokenizer, TokenizerKind};
use fireclay_kernels::{AdamW, HeadLossOptions, SampledRows, Sampling};
use fireclay_model::TransformerConfig;

type B = NdArray;

fn main() -> Result<(), Failure> {
    let device = Default::default();
    let text = "one two three four five six seven eight nine ten. ".repeat(200);
    let tokenizer = Tokenizer::train(TokenizerKind::Char, &text)?;
    let corpus = Corpus::Text(TextCorpus::new(tokenizer.encode(&text)?, 64, 0.1)?);

    let config = TransformerConfig::llama(tokenizer.vocab_size(), 128, 64, 2, 4).with_init_deviation(0.1);
    let mut model = config.init::<Autodiff<B>>(1, &device)?;
    let mut optimizer = Optimizer::new(&model);
    let adamw = AdamW {
        learning_rate: 3e-3,
        beta_1: 0.9,
        beta_2: 0.95,
        epsilon: 1e-8,
        weight_decay: 0.1,
        max_grad_norm: Some(1.0),
        step: 0, // the optimizer counts
    };
    for step in 0..100 {
        let batch = corpus.batch(1, step, 8);
        let loss = language::loss(&model, &batch, HeadLossOptions::new(), &device);
        let gradients = ParameterGradients::take(&model, loss.backward());
        (model, _) = optimizer.step(model, gradients, adamw);
        if step % 20 == 0 {
            println!("step {step}: loss {:.3}", loss.into_scalar());
        }
    }

    let model = model.valid();
    let mut cache = model.cache(1, 128);
    let prompt = tokenizer.encode("one two ")?;
    let mut rows = SampledRows::new(&[0], &device);
    let hidden = model.prefill(&[&prompt], &mut cache);
    let mut next = model.sample(hidden, &Sampling::greedy(), &mut rows);
    let mut stream = tokenizer.stream();
    print!("one two ");
    for _ in 0..41 {
        print!("{}", stream.push(next.clone().into_scalar() as u32)?);
        next = model.sample(model.decode(next, &mut cache), &Sampling::greedy(), &mut rows);
    }
    println!();
    Ok(())
}
