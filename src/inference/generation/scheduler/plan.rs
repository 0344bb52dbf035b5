//! Which texts a step reads and writes, and their pages.

use burn::tensor::Tensor;
use fireclay_kernels::{Backend, TokenCounts};

use super::{Scheduler, Text};
use crate::failure::Failure;

impl<B: Backend> Scheduler<B> {
    /// Texts that fill the context go on from their own ends: these are read anew.
    pub(super) fn slide(&mut self) -> Result<(), Failure> {
        let Some(kept) = self.kept else { return Ok(()) };
        let full = |this: &Self, text: &Text| {
            text.row.is_some_and(|row| this.cache.length(row) == this.context) && !text.is_complete()
        };
        if !self.running.iter().any(|text| full(self, text)) {
            return Ok(());
        }
        // Their last tokens have to be known.
        self.read(0)?;
        for at in 0..self.running.len() {
            if full(self, &self.running[at]) {
                let text = &mut self.running[at];
                text.begin = text.tokens.len().saturating_sub(kept);
                text.slides += 1;
                text.drawn_at = None;
                let row = text.row.replace(self.cache.add_row());
                row.into_iter().for_each(|row| self.cache.remove_row(row));
            }
        }
        Ok(())
    }

    /// Which texts read how many tokens in this step, with pages for all that the step reads and writes.
    pub(super) fn plan(&mut self) -> Result<Vec<(usize, usize)>, Failure> {
        // Texts that are written come first, a token each.
        self.give_turns();
        for at in 0..self.running.len() {
            self.running[at].reads = self.writes(&self.running[at]).into();
        }
        let mut at = 0;
        while at < self.running.len() {
            let text = &self.running[at];
            let Some(row) = text.row.filter(|_| self.writes(text)) else {
                at += 1;
                continue;
            };
            let arrival = text.arrival;
            while self.cache.reserve(row, 1).is_err() {
                if !self.release() {
                    self.preempt()?;
                }
                if !self.running.iter().any(|text| text.arrival == arrival) {
                    break;
                }
            }
            // One that came before may be gone.
            at = self.running.iter().position(|text| text.arrival >= arrival).unwrap_or(self.running.len());
            at += usize::from(self.running.get(at).is_some_and(|text| text.arrival == arrival));
        }
        let writing = self.running.iter().filter(|text| self.writes(text)).count();
        let mut budget = self.options.step_tokens.saturating_sub(writing).max(usize::from(writing == 0));
        let mut active = self.running.iter().filter(|text| !text.is_complete()).count();
        // Prompts are read ahead only beside one that is read in its turn.
        let mut reads_in_turn = active < self.options.rows && !self.waiting.is_empty();
        for at in 0..self.running.len() {
            let text = &self.running[at];
            if budget == 0 || !text.has_turn || text.drawn_at.is_some() || text.is_complete() || self.writes(text) {
                continue;
            }
            if let Some(count) = self.readable(at, budget) {
                self.running[at].reads = count;
                budget -= count;
                reads_in_turn |= count > 0;
            }
        }
        let most = if reads_in_turn { self.texts_at_once() } else { 0 };
        while budget > 0 && active < most && !self.waiting.is_empty() {
            if self.cache.pages().1 == 0 && !self.release() {
                break;
            }
            let has_turn = active < self.options.rows;
            if !has_turn && !self.may_read_ahead(budget) {
                break;
            }
            self.admit(has_turn);
            active += 1;
            let at = self.running.len() - 1;
            match self.readable(at, budget) {
                Some(count) => {
                    self.running[at].reads = count;
                    budget -= count;
                }
                None => {
                    // It waits for pages, at the head of the others.
                    if let Some(text) = self.running.pop() {
                        let text = self.taken_back(text);
                        self.waiting.push_front(text);
                    }
                    break;
                }
            }
        }
        // Where nothing moves, two texts that are being read may have all pages: one gives way.
        if self.running.iter().all(|text| text.reads == 0) && self.running.iter().any(|text| !text.is_complete()) {
            self.preempt()?;
            return self.plan();
        }
        let reads = self.running.iter().enumerate().filter(|(_, text)| text.reads > 0 && !self.writes(text));
        Ok(reads.map(|(at, text)| (at, text.reads)).collect())
    }

    /// The first of those that are not complete have their turns.
    fn give_turns(&mut self) {
        let active = self.running.iter_mut().filter(|text| !text.is_complete());
        active.enumerate().for_each(|(place, text)| text.has_turn = place < self.options.rows);
    }

    /// Whether this step gives a text a token behind one that was drawn, or behind its last one, where it has read all others.
    pub(super) fn writes(&self, text: &Text) -> bool {
        text.has_turn && !text.is_complete() && (text.drawn_at.is_some() || self.unread(text) == 1)
    }

    /// Tokens of a text that are known, and not read.
    fn unread(&self, text: &Text) -> usize {
        let read = text.begin + text.row.map_or(0, |row| self.cache.length(row));
        text.tokens.len().saturating_sub(read)
    }

    /// Whether the first of those that wait may be read before its turn, all of it or as much as this step has room for, a page at the
    /// least: where a quarter of all pages are left, and half of these are enough for it.
    fn may_read_ahead(&self, budget: usize) -> bool {
        let tokens = self.waiting.front().map_or(0, |text| text.tokens.len() - text.begin);
        let page_tokens = self.cache.page_tokens();
        let (pages, pages_left) = self.cache.pages();
        let plenty = 4 * pages_left >= pages && 2 * tokens.div_ceil(page_tokens) <= pages_left;
        plenty && tokens.min(page_tokens) <= budget
    }

    /// Tokens that a text can read now, up to `budget`, with pages for them.
    fn readable(&mut self, at: usize, budget: usize) -> Option<usize> {
        let text = &self.running[at];
        let row = text.row?;
        let left = self.unread(text);
        let count = left.saturating_sub(usize::from(!text.has_turn)).min(budget);
        // All that it will ever need, where there is room: its pages are sent to the device once then.
        let behind =
            (text.request.max_tokens - text.drawn).min(self.context.saturating_sub(text.tokens.len() - text.begin));
        let (_, pages_left) = self.cache.pages();
        let ahead = (left + behind).div_ceil(self.cache.page_tokens()) + 1;
        if self.waiting.is_empty() && 2 * ahead <= pages_left && self.cache.reserve(row, left + behind).is_ok() {
            return Some(count);
        }
        if self.cache.reserve(row, count).is_ok() || (self.release() && self.cache.reserve(row, count).is_ok()) {
            return Some(count);
        }
        // As many as there are pages for.
        let (_, pages_left) = self.cache.pages();
        let room = self.cache.pages_of(row) + pages_left;
        let fits = (room * self.cache.page_tokens()).saturating_sub(self.cache.length(row)).min(count);
        (fits > 0 && self.cache.reserve(row, fits).is_ok()).then_some(fits)
    }

    /// Gives up pages that texts took ahead; whether there were any.
    fn release(&mut self) -> bool {
        let (_, before) = self.cache.pages();
        let rows = self.running.iter().filter_map(|text| Some((text.row?, text.reads)));
        rows.for_each(|(row, reads)| self.cache.release(row, reads));
        self.cache.pages().1 > before
    }

    /// The first of those that wait gets a row, with as much of its tokens as the cache has.
    fn admit(&mut self, has_turn: bool) {
        let Some(mut text) = self.waiting.pop_front() else { return };
        // A prompt whose log-probabilities are asked for is read whole.
        text.row = Some(match text.awaits_prompt() {
            true => self.cache.add_row(),
            false => self.cache.add_row_of(&text.tokens[text.begin..]),
        });
        if !text.was_admitted {
            text.was_admitted = true;
            text.cached = text.row.map(|row| self.cache.length(row));
        }
        text.has_turn = has_turn;
        if text.needs_line() {
            let line = self.free_line();
            if let Some(counts) = &mut self.counts {
                let (prompt, written) = text.tokens.split_at(text.prompt_length());
                counts.begin(line, prompt, written, &text.request.biases);
            }
            text.line = Some(line);
        }
        self.running.push(text);
    }

    /// A line of counts that no text has.
    fn free_line(&mut self) -> usize {
        if let Some(line) = self.free_lines.pop() {
            return line;
        }
        let lines = self.counts.as_ref().map_or(0, |counts| counts.prompt.dims()[0]);
        let more = TokenCounts::new(lines.max(4), self.vocabulary, &self.device);
        let all = match self.counts.take() {
            Some(counts) => TokenCounts {
                prompt: Tensor::cat(vec![counts.prompt, more.prompt], 0),
                written: Tensor::cat(vec![counts.written, more.written], 0),
                bias: Tensor::cat(vec![counts.bias, more.bias], 0),
            },
            None => more,
        };
        self.free_lines.extend((lines..all.prompt.dims()[0]).rev());
        self.counts = Some(all);
        self.free_lines.pop().unwrap_or(lines)
    }

    /// Preempts a text: it gives up its pages, and waits to be recomputed.
    fn preempt(&mut self) -> Result<(), Failure> {
        // What it has drawn has to be known.
        self.read(0)?;
        let Some(at) = self.victim() else { return Ok(()) };
        self.preemptions += 1;
        let is_last = at + 1 == self.running.len();
        let text = self.running.remove(at);
        let mut text = self.taken_back(text);
        if is_last {
            self.waiting.push_front(text);
        } else {
            // Those that came after it keep their rows.
            text.arrival = self.arrive();
            self.waiting.push_back(text);
        }
        Ok(())
    }

    /// The text that came last, of the client that has most pages where there are several.
    fn victim(&self) -> Option<usize> {
        let pages = |text: &Text| text.row.map_or(0, |row| self.cache.pages_of(row));
        let mut of_clients: Vec<(u64, usize)> = Vec::new();
        for text in self.running.iter().rev() {
            match of_clients.iter_mut().find(|(client, _)| *client == text.request.client) {
                Some((_, held)) => *held += pages(text),
                None => of_clients.push((text.request.client, pages(text))),
            }
        }
        // The first of the greatest, which is the one that came last.
        let most = of_clients.iter().map(|(_, held)| *held).max()?;
        let (client, _) = of_clients.into_iter().find(|(_, held)| *held == most)?;
        self.running.iter().rposition(|text| text.request.client == client)
    }

    /// A text without row and line.
    pub(super) fn taken_back(&mut self, mut text: Text) -> Text {
        if let Some(row) = text.row.take() {
            // The last token of a launch may end the text, and is not read then: its keys are not there.
            let read = &text.tokens[text.begin..];
            let read = match read.split_last() {
                Some((last, before)) if text.request.ends.contains(last) => before,
                _ => read,
            };
            self.cache.make_known(row, read);
            self.cache.remove_row(row);
        }
        self.free_lines.extend(text.line.take());
        text.drawn_at = None;
        text
    }
}
