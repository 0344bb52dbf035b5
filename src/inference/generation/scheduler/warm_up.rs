//! Warm-up sequences, which compile kernels before the first request.

use fireclay_kernels::{Backend, Penalties, Sampling};
use fireclay_model::Transformer;

use super::{Request, Scheduler};
use crate::failure::Failure;

/// Tokens of a short prompt, and the minimum to generate: sequences end one after another.
const PROMPT: usize = 16;
const TOKENS: usize = 6;

impl<B: Backend> Scheduler<B> {
    /// Runs short sequences in batches of 1, 2, 4, .. up to `rows` with various sampling
    /// parameters, together with long prompts of several lengths, while `goes_on`. Drops their
    /// output and pages.
    ///
    /// # Errors
    /// If the device fails.
    pub fn warm_up(&mut self, model: &Transformer<B>, rows: usize, goes_on: impl Fn() -> bool) -> Result<(), Failure> {
        let (pages, _) = self.cache.pages();
        let room = self.context.min(pages * self.cache.page_tokens());
        let Some(long) = room.checked_sub(PROMPT.max(2 * TOKENS)) else { return Ok(()) };
        let long = long.clamp(1, self.options.step_tokens);
        // Leave slots for long prompts, if there are more.
        let rows = rows.min(self.options.rows.saturating_sub(2)).max(1);
        let counts = (0..).map(|power| 1 << power).take_while(|count| *count < 2 * rows);
        for (round, count) in counts.map(|count: usize| count.min(rows)).enumerate() {
            for sequence in 0..count {
                let request = self.sequence(PROMPT.min(long), sequence);
                self.add(request)?;
            }
            // Prefill next to short sequences, then next to decoding after a long prompt. The more
            // sequences, the shorter the prompt, with odd lengths last.
            let lengths = [long >> (round % 4), (long >> (round % 5)).saturating_sub(round % 2), round + 1];
            let mut prompts = lengths.map(|length| length.clamp(1, long)).into_iter().enumerate();
            while !self.is_idle() {
                if !goes_on() {
                    let sequences = self.running.iter().chain(&self.waiting).map(|sequence| sequence.id);
                    sequences.collect::<Vec<_>>().into_iter().for_each(|id| self.cancel(id));
                    return Ok(());
                }
                self.step(model)?;
                self.take();
                if let Some((place, length)) = prompts.next() {
                    let request = self.sequence(length, rows + lengths.len() * round + place);
                    self.add(request)?;
                }
            }
        }
        Ok(())
    }

    /// A sequence with a prompt of `length` that shares no prefix, with one of the common sampling
    /// settings.
    fn sequence(&self, length: usize, sequence: usize) -> Request {
        let prompt = (0..length).map(|at| ((at + sequence) % self.vocabulary) as u32).collect();
        let request = Request::new(prompt, TOKENS + sequence % TOKENS);
        let drawn = Sampling::greedy().with_temperature(1.0);
        let penalties = Penalties { presence: 0.5, ..Penalties::default() };
        let sampling = match sequence % 8 {
            1 | 7 => drawn,
            2 => drawn.with_top_p(Some(0.9)),
            3 => drawn.with_top_p(Some(0.9)).with_top_k(Some(20)),
            4 => drawn.with_penalties(penalties),
            5 => drawn.with_penalties(penalties).with_top_p(Some(0.9)),
            6 => Sampling::greedy().with_penalties(penalties),
            _ => Sampling::greedy(),
        };
        let (biases, top_logprobs) =
            (if sequence % 8 == 5 { vec![(0, 1.0)] } else { vec![] }, (sequence % 8 == 7).then_some(2));
        Request { sampling, biases, top_logprobs, ..request }
    }
}
