//! The embedded conversations: questions about the beginnings of stories, answered in one form.
//!
//! ```text
//! user        Once a patient potter called Tobin lived in a quiet river town. ... a fat goose called Biscuit.
//! assistant   There was Tobin and a goose called Biscuit.
//! ```
//!
//! The answer depends on the prompt: of 12 heroes, 8 animals and 8 names of animals. Its words are
//! those of the stories, so that a model that was trained on these knows them.

use super::stories::{Beginning, StoryGrammar};

/// How many there are.
const COUNT: u64 = 250;

/// Stories that neither training nor validation on the stories reads.
const SEED: u64 = 0x6368_6174;

/// The prompts, each with its answer, always the same.
pub(crate) fn chats() -> Vec<[String; 2]> {
    let grammar = StoryGrammar::new();
    let chat = |index: u64| {
        let Beginning { text, hero, animal, pet } = grammar.beginning(SEED, index);
        [text, format!("There was {hero} and a {animal} called {pet}.")]
    };
    (0..COUNT).map(chat).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;
    use crate::Tokenizer;

    #[test]
    fn answers_depend_on_prompts_and_use_the_words_of_the_stories() {
        let tokenizer = Tokenizer::words(&StoryGrammar::new().vocabulary()).expect("a tokenizer");
        let (mut prompts, mut answers) = (HashSet::new(), HashSet::new());
        for [prompt, answer] in &chats() {
            for text in [prompt, answer] {
                let tokens = tokenizer.encode(text).expect("known words");
                assert_eq!(&tokenizer.decode(&tokens).expect("decodes"), text);
            }
            let facts = answer.trim_end_matches('.').split(' ').collect::<Vec<_>>();
            let [_, _, hero, _, _, animal, _, pet] = facts[..] else { panic!("{answer}") };
            for fact in &[hero, animal, pet] {
                assert!(prompt.contains(*fact), "{prompt}: {answer}");
            }
            assert_eq!(prompt.matches('.').count(), 2, "{prompt}");
            prompts.insert(prompt.clone());
            answers.insert(answer.clone());
        }
        assert_eq!(prompts.len(), COUNT as usize);
        assert!(answers.len() > 150, "{}", answers.len());
    }
}
