//! Sentence embeddings from an encoder of the hub's BERT family, such as all-MiniLM-L6-v2: the mean
//! of its hidden states, normalized (Reimers and Gurevych, 2019, "Sentence-BERT").
//!
//! `cargo run --release --example embeddings -- MODEL_DIR "a text" "another"` prints one embedding
//! per line, as JSON, and the similarities of the inputs.

use std::path::PathBuf;

use burn::backend::NdArray;
use burn::tensor::{FloatDType, Int, Tensor};
use fireclay::Failure;
use fireclay_datasets::Tokenizer;
use fireclay_model::{ModelFolder, Transformer};

type B = NdArray;

fn main() -> Result<(), Failure> {
    let mut arguments = std::env::args().skip(1);
    let folder = arguments.next().map(PathBuf::from);
    let folder = folder.ok_or_else(|| Failure::usage("usage: embeddings MODEL_DIR TEXT..."))?;
    let inputs: Vec<String> = arguments.collect();

    let device = Default::default();
    let model: Transformer<B> = ModelFolder::new(&folder).load_in(FloatDType::F32, &mut |_, _| {}, &device)?;
    let tokenizer = Tokenizer::load(&folder.join("tokenizer.json"))?;
    let mut embeddings = Vec::new();
    for text in &inputs {
        let embedding = embed(&model, &tokenizer, text)?;
        println!("{}", serde_json::json!({ "text": text, "embedding": embedding }));
        embeddings.push(embedding);
    }
    for (text, embedding) in inputs.iter().zip(&embeddings) {
        let alike = embeddings.iter().map(|other| embedding.iter().zip(other).map(|(a, b)| a * b).sum::<f32>());
        let row: Vec<String> = alike.map(|cosine| format!("{cosine:6.3}")).collect();
        eprintln!("{}  {text}", row.join(" "));
    }
    Ok(())
}

/// The embedding of a text, truncated to the model's context.
fn embed(model: &Transformer<B>, tokenizer: &Tokenizer, text: &str) -> Result<Vec<f32>, Failure> {
    // With the special tokens that the tokenizer adds, [CLS] and [SEP].
    let tokens: Vec<i32> = tokenizer.encode_prompt(text)?.into_iter().map(|token| token as i32).collect();
    let tokens = &tokens[..tokens.len().min(model.config().context_length)];
    let ids = Tensor::<B, 1, Int>::from_ints(tokens, &Default::default()).unsqueeze::<2>();
    let mean: Tensor<B, 1> = model.forward(ids).mean_dim(1).flatten(0, 2);
    let length = mean.clone().powi_scalar(2).sum().sqrt();
    Ok(mean.div(length).into_data().iter::<f32>().collect())
}
