//! The decoder in your own program: open a model once, then generate any number of times, token by
//! token.
//!
//! `cargo run --release --example embed_decoder -- MODEL_DIR PROMPT...`

use std::io::Write;
use std::path::PathBuf;

use burn::backend::NdArray;
use fireclay::Failure;
use fireclay::inference::generation::{GenerationOptions, Generator};
use fireclay::precision::Precision;

fn main() -> Result<(), Failure> {
    let mut arguments = std::env::args().skip(1);
    let folder = arguments.next().map(PathBuf::from);
    let folder = folder.ok_or_else(|| Failure::usage("usage: embed_decoder MODEL_DIR PROMPT..."))?;
    let generator = Generator::<NdArray>::open(&folder, Precision::F32, Default::default())?;
    let options = GenerationOptions { max_tokens: Some(40), top_p: Some(0.9), ..GenerationOptions::default() };

    let prompts: Vec<String> = arguments.collect();
    for prompt in &prompts {
        print!("{prompt}");
        let done = generator.generate(&generator.prepare(prompt, &options)?, &options, |text| {
            print!("{text}");
            // A closed output is not an error.
            let _ = std::io::stdout().flush();
        })?;
        println!("\n[{} tokens]", done.tokens.len());
    }

    // A batch; each output equals that of a separate call.
    let prepared = prompts.iter().map(|prompt| generator.prepare(prompt, &options)).collect::<Result<Vec<_>, _>>()?;
    let together = generator.generate_batch(&prepared.iter().collect::<Vec<_>>(), 0, &options, |_, _| {})?;
    println!(
        "{} outputs in a batch, {} tokens",
        together.len(),
        together.iter().map(|one| one.tokens.len()).sum::<usize>()
    );
    Ok(())
}
