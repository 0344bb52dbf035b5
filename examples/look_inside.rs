//! Opens a model folder and looks inside: where its heads attend, and what it would predict after
//! each block.
//!
//! `cargo run --release --example look_inside -- [MODEL TEXT]` takes a folder, or a name on the hub
//! such as `openai-community/gpt2`. Without one it first trains a model to repeat what it has seen,
//! and finds the head that does it: an induction head (Olsson et al., 2022). Plots go into
//! `target/look_inside`.

use std::path::{Path, PathBuf};

use burn::backend::NdArray;
use burn::tensor::{Int, Tensor};
use fireclay::Failure;
use fireclay::download::{model_folder, show_fetching};
use fireclay::inference::language_model::LanguageModel;
use fireclay::plots::{attention_map, attention_maps, heat_map, logit_lens};
use fireclay::precision::Precision;
use fireclay::recipe::Recipe;
use fireclay::tasks::{Language, Task};
use fireclay::training::Trainer;
use fireclay_datasets::{Corpus, TextCorpus, Tokenizer, TokenizerKind};
use fireclay_kernels::RandomKey;

type B = NdArray;

fn main() -> Result<(), Failure> {
    let device = Default::default();
    let out = Path::new("target/look_inside");
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let (model, text) = match &arguments[..] {
        [model, text] => (PathBuf::from(model), text.clone()),
        [] => (repeater(out)?, "kvdqhzubpw.kvdqhzubpw".to_string()),
        _ => return Err(Failure::usage("usage: look_inside [MODEL TEXT]")),
    };
    let folder = model_folder(&model, &mut show_fetching())?;
    let LanguageModel { model, tokenizer } = LanguageModel::<B>::open(&folder, Precision::F32, &device)?;

    let ids = tokenizer.encode_prompt(&text)?;
    let tokens = ids.iter().map(|id| tokenizer.decode(&[*id])).collect::<Result<Vec<String>, _>>()?;
    let row: Vec<i32> = ids.iter().map(|id| *id as i32).collect();
    let inside = model.inspect(Tensor::<B, 1, Int>::from_ints(&*row, &device).unsqueeze::<2>());

    // Every head at a glance, then the one that attends most to the token after the previous
    // occurrence of its own.
    let mut heads = Vec::new();
    for layer in 0..inside.attention.len() {
        for head in 0..model.config().n_heads {
            let weights: Vec<f32> = inside.head(layer, 0, head).into_data().iter().collect();
            heads.push((format!("layer {layer}, head {head}"), weights));
        }
    }
    attention_maps("Where the heads attend", model.config().n_heads, &heads)?.save(&out.join("heads.svg"))?;
    let best = heads.iter().map(|(name, weights)| (induction(&ids, weights), name, weights));
    if let Some((score, name, weights)) = best.max_by(|a, b| a.0.total_cmp(&b.0)) {
        println!("{name} gives {:.0}% of its attention to the token after the previous occurrence", 100.0 * score);
        attention_map(name, &tokens, weights)?.save(&out.join("induction.svg"))?;
    }
    let streams = inside.residual.iter().map(|residual| model.logit_lens(residual.clone()));
    let lens = logit_lens("What it would say after each block", &tokens, streams, |id| tokenizer.decode(&[id]))?;
    heat_map(&lens)?.save(&out.join("lens.svg"))?;
    println!("see {}", out.display());
    Ok(())
}

/// A head's mean weight on the token after the previous occurrence, over all tokens that have one.
fn induction(ids: &[u32], weights: &[f32]) -> f32 {
    let before = |at: usize| ids[..at].iter().rposition(|id| *id == ids[at]);
    let found: Vec<f32> = (0..ids.len()).filter_map(|at| Some(weights[at * ids.len() + before(at)? + 1])).collect();
    found.iter().sum::<f32>() / found.len().max(1) as f32
}

/// Trains a two-layer model on strings of letters, each written twice.
fn repeater(folder: &Path) -> Result<PathBuf, Failure> {
    let mut text = String::new();
    for line in 0..20_000 {
        let letter = |at: u32| char::from(b'a' + (RandomKey::new(1).uniform(line, at) * 26.0) as u8);
        let word: String = (0..10).map(letter).collect();
        text.push_str(&format!("{word}.{word}\n"));
    }
    let tokenizer = Tokenizer::train(TokenizerKind::Char, &text)?;
    let corpus = Corpus::Text(TextCorpus::new(tokenizer.encode(&text)?, 44, 0.01)?);
    let recipe = Recipe::shipped("stories")?
        .with("d_model", "64")?
        .with("seq_length", "44")?
        .with("batch_size", "32")?
        .with("steps", "600")?;
    let mut trainer = Trainer::<B>::new(&recipe, Task::Language(Language::new(corpus, tokenizer)), Default::default())?;
    while trainer.step() < recipe.training.steps {
        let step = trainer.train_step()?;
        if trainer.step() % 100 == 0 {
            println!("step {}: loss {:.3}", trainer.step(), step.loss()?);
        }
    }
    trainer.save(folder)?;
    Ok(folder.to_path_buf())
}
