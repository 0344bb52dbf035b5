//! probe
use burn::backend::NdArray;
use fireclay::training::*;
fn main() {
    let mut recipe = Recipe::shipped("stories").unwrap();
    for arg in std::env::args().skip(1) {
        let (k, v) = arg.split_once('=').unwrap();
        recipe = recipe.with(k, v).unwrap();
    }
    let (corpus, tok) = recipe.corpus().unwrap();
    let recipe = recipe.for_vocabulary(tok.vocab_size());
    println!("{} params", recipe.model_config().unwrap().parameter_count());
    let mut t = Trainer::<NdArray>::new(&recipe, corpus, Default::default()).unwrap();
    let begin = std::time::Instant::now();
    let mut n = 0;
    for s in 0..recipe.training.steps {
        let o = t.train_step();
        n += o.tokens;
        if s % 50 == 0 || s + 1 == recipe.training.steps {
            println!(
                "{s} {:.4} {:.0} tok/s {:.1}s",
                o.loss().unwrap(),
                n as f64 / begin.elapsed().as_secs_f64(),
                begin.elapsed().as_secs_f64()
            );
        }
        if s % 200 == 199 {
            println!("valid {:.4}", t.validate(20000).unwrap());
        }
    }
    println!("valid {:.4} vs {:?}", t.validate(100000).unwrap(), t.corpus().source_entropy());
}
