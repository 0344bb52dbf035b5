//! Texts that nobody asked for: their kernels are compiled before somebody waits for them.

use fireclay_kernels::Backend;
use fireclay_model::Transformer;

use super::{Request, Scheduler};
use crate::failure::Failure;

/// Tokens of a short prompt, and the fewest behind it: texts end one after another.
const PROMPT: usize = 16;
const TOKENS: usize = 4;

impl<B: Backend> Scheduler<B> {
    /// Writes short texts, one alone and then twice as many at a time up to `rows`, and reads long prompts beside one and beside all, as long
    /// as `goes_on`. What they wrote is gone, and so are their pages.
    ///
    /// # Errors
    /// If the device fails.
    pub fn warm_up(&mut self, model: &Transformer<B>, rows: usize, goes_on: impl Fn() -> bool) -> Result<(), Failure> {
        let (pages, _) = self.cache.pages();
        let room = self.context.min(pages * self.cache.page_tokens());
        let Some(long) = room.checked_sub(PROMPT.max(2 * TOKENS)) else { return Ok(()) };
        let long = long.clamp(1, self.options.step_tokens);
        let vocabulary = self.vocabulary;
        // None has what another has, which the cache would know.
        let request = |length: usize, text: usize| {
            let prompt = (0..length).map(|at| ((at + text) % vocabulary) as u32).collect();
            let request = Request::new(prompt, TOKENS + text % TOKENS);
            let sampling = request.sampling.with_temperature((text % 2) as f64);
            Request { sampling, ..request }
        };
        // A row is left for the long prompt, where there is more than one.
        let rows = rows.min(self.options.rows - 1).max(1);
        let counts = (0..).map(|power| 1 << power).take_while(|count| *count < 2 * rows);
        for count in counts.map(|count: usize| count.min(rows)) {
            for text in 0..count {
                self.add(request(PROMPT.min(long), text))?;
            }
            let mut reads_long = count == 1 || count == rows;
            while !self.is_idle() {
                if !goes_on() {
                    let texts = self.running.iter().chain(&self.waiting).map(|text| text.id);
                    texts.collect::<Vec<_>>().into_iter().for_each(|id| self.cancel(id));
                    return Ok(());
                }
                self.step(model)?;
                self.take();
                if std::mem::take(&mut reads_long) {
                    self.add(request(long, count))?;
                }
            }
        }
        Ok(())
    }
}
