//! Sentence embeddings from an encoder of the hub's BERT family, such as all-MiniLM-L6-v2: the mean
//! of its hidden states, normalized (Reimers and Gurevych, 2019, "Sentence-BERT").
//!
//! `cargo run --release --example embeddings -- MODEL_DIR "a text" "another"` prints one embedding
//! per line, as JSON, and the similarities of the inputs.

use std::path::PathBuf;

use burn::backend::NdArray;
use burn::tensor::{FloatDType, Int, Tensor};
use fireclay::Failure;
use fireclay::inference::text_encoder::{EncodedText, TextEncoder};
use fireclay_model::{ModelFolder, Tokens, Transformer};

type B = NdArray;

fn main() -> Result<(), Failure> {
    let mut arguments = std::env::args().skip(1);
    let folder = arguments.next().map(PathBuf::from);
    let folder = folder.ok_or_else(|| Failure::usage("usage: embeddings MODEL_DIR TEXT..."))?;
    let inputs: Vec<String> = arguments.collect();

    let device = Default::default();
    let model: Transformer<B> = ModelFolder::new(&folder).load_in(FloatDType::F32, &mut |_, _| {}, &device)?;
    let encoder = TextEncoder::open(&folder)?;
    let mut embeddings = Vec::new();
    for text in &inputs {
        let embedding = embed(&model, &encoder, text)?;
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
fn embed(model: &Transformer<B>, encoder: &TextEncoder, text: &str) -> Result<Vec<f32>, Failure> {
    // With the special tokens that the tokenizer adds, [CLS] and [SEP].
    let EncodedText { ids, types } = encoder.encode(text)?;
    let row = |values: Vec<u32>| {
        let values: Vec<i32> =
            values.into_iter().take(model.config().context_length).map(|value| value as i32).collect();
        Tensor::<B, 1, Int>::from_ints(&values[..], &Default::default()).unsqueeze::<2>()
    };
    let tokens = Tokens::from(row(ids));
    // Words have types in models that Fireclay trains on utterances.
    let tokens = if types.is_empty() { tokens } else { tokens.with_types(row(types)) };
    let mean: Tensor<B, 1> = model.forward(tokens).mean_dim(1).flatten(0, 2);
    let length = mean.clone().powi_scalar(2).sum().sqrt();
    Ok(mean.div(length).into_data().iter::<f32>().collect())
}
