//! Plans a step: which sequences prefill and decode, and their pages.

use burn::tensor::Tensor;
use fireclay_kernels::{Backend, TokenCounts};

use super::{Scheduler, Sequence};
use crate::failure::Failure;

impl<B: Backend> Scheduler<B> {
    /// Shifts the context of full sequences: their last tokens are recomputed.
    pub(super) fn slide(&mut self) -> Result<(), Failure> {
        let Some(kept) = self.kept else { return Ok(()) };
        let full = |this: &Self, sequence: &Sequence| {
            sequence.row.is_some_and(|row| this.cache.length(row) == this.context) && !sequence.is_complete()
        };
        if !self.running.iter().any(|sequence| full(self, sequence)) {
            return Ok(());
        }
        // Their last tokens have to be known.
        self.read(0)?;
        for at in 0..self.running.len() {
            if full(self, &self.running[at]) {
                let sequence = &mut self.running[at];
                sequence.begin = sequence.tokens.len().saturating_sub(kept);
                sequence.slides += 1;
                sequence.drawn_at = None;
                let row = sequence.row.replace(self.cache.add_row());
                row.into_iter().for_each(|row| self.cache.remove_row(row));
            }
        }
        Ok(())
    }

    /// The prefills of this step, as sequence and token count, with pages reserved for all of its
    /// tokens.
    pub(super) fn plan(&mut self) -> Result<Vec<(usize, usize)>, Failure> {
        // Decoding sequences come first, one token each.
        self.assign_slots();
        for at in 0..self.running.len() {
            self.running[at].scheduled = self.decodes(&self.running[at]).into();
        }
        let mut at = 0;
        while at < self.running.len() {
            let sequence = &self.running[at];
            let Some(row) = sequence.row.filter(|_| self.decodes(sequence)) else {
                at += 1;
                continue;
            };
            let arrival = sequence.arrival;
            while self.cache.reserve(row, 1).is_err() {
                if !self.release_reserved() {
                    self.preempt()?;
                }
                if !self.running.iter().any(|sequence| sequence.arrival == arrival) {
                    break;
                }
            }
            // Sequences before it may have been preempted.
            at = self.running.iter().position(|sequence| sequence.arrival >= arrival).unwrap_or(self.running.len());
            at += usize::from(self.running.get(at).is_some_and(|sequence| sequence.arrival == arrival));
        }
        let decoding = self.running.iter().filter(|sequence| self.decodes(sequence)).count();
        let mut budget = self.options.step_tokens.saturating_sub(decoding).max(usize::from(decoding == 0));
        let mut active = self.running.iter().filter(|sequence| !sequence.is_complete()).count();
        // Prefill ahead only together with a prefill in a slot.
        let mut prefills_in_slot = active < self.options.rows && !self.waiting.is_empty();
        for at in 0..self.running.len() {
            let sequence = &self.running[at];
            if budget == 0
                || !sequence.has_slot
                || sequence.drawn_at.is_some()
                || sequence.is_complete()
                || self.decodes(sequence)
            {
                continue;
            }
            if let Some(count) = self.prefillable(at, budget) {
                self.running[at].scheduled = count;
                budget -= count;
                prefills_in_slot |= count > 0;
            }
        }
        let most = if prefills_in_slot { self.max_active() } else { 0 };
        while budget > 0 && active < most && !self.waiting.is_empty() {
            if self.cache.pages().1 == 0 && !self.release_reserved() {
                break;
            }
            let has_slot = active < self.options.rows;
            if !has_slot && !self.may_prefill_ahead(budget) {
                break;
            }
            self.admit(has_slot);
            active += 1;
            let at = self.running.len() - 1;
            match self.prefillable(at, budget) {
                Some(count) => {
                    self.running[at].scheduled = count;
                    budget -= count;
                }
                None => {
                    // It waits for pages, at the head of the queue.
                    if let Some(sequence) = self.running.pop() {
                        let sequence = self.release(sequence);
                        self.waiting.push_front(sequence);
                    }
                    break;
                }
            }
        }
        // Nothing can run: several prefilling sequences hold all pages, so preempt one.
        if self.running.iter().all(|sequence| sequence.scheduled == 0)
            && self.running.iter().any(|sequence| !sequence.is_complete())
        {
            self.preempt()?;
            return self.plan();
        }
        let prefills =
            self.running.iter().enumerate().filter(|(_, sequence)| sequence.scheduled > 0 && !self.decodes(sequence));
        Ok(prefills.map(|(at, sequence)| (at, sequence.scheduled)).collect())
    }

    /// Gives slots to the first incomplete sequences.
    fn assign_slots(&mut self) {
        let active = self.running.iter_mut().filter(|sequence| !sequence.is_complete());
        active.enumerate().for_each(|(place, sequence)| sequence.has_slot = place < self.options.rows);
    }

    /// The sequences that this step decodes.
    pub(super) fn decoding(&self) -> Vec<usize> {
        (0..self.running.len()).filter(|at| self.decodes(&self.running[*at])).collect()
    }

    /// Whether this step decodes a sequence: it has a sampled token, or only its last token is not
    /// computed.
    fn decodes(&self, sequence: &Sequence) -> bool {
        sequence.has_slot && !sequence.is_complete() && (sequence.drawn_at.is_some() || self.uncomputed(sequence) == 1)
    }

    /// Known tokens of a sequence that are not in the cache.
    fn uncomputed(&self, sequence: &Sequence) -> usize {
        let read = sequence.begin + sequence.row.map_or(0, |row| self.cache.length(row));
        sequence.tokens.len().saturating_sub(read)
    }

    /// Whether the first waiting sequence may prefill without a slot, fully or in part, at least a
    /// page: a quarter of all pages must be free, and half of those must suffice.
    fn may_prefill_ahead(&self, budget: usize) -> bool {
        let tokens = self.waiting.front().map_or(0, |sequence| sequence.tokens.len() - sequence.begin);
        let page_tokens = self.cache.page_tokens();
        let (pages, free_pages) = self.cache.pages();
        let plenty = 4 * free_pages >= pages && 2 * tokens.div_ceil(page_tokens) <= free_pages;
        plenty && tokens.min(page_tokens) <= budget
    }

    /// The tokens of a sequence to prefill now, up to `budget`, with pages reserved.
    fn prefillable(&mut self, at: usize, budget: usize) -> Option<usize> {
        let sequence = &self.running[at];
        let row = sequence.row?;
        let left = self.uncomputed(sequence);
        let count = left.saturating_sub(usize::from(!sequence.has_slot)).min(budget);
        // If there is room, reserve all pages it will ever need, so that they are uploaded once.
        let behind = (sequence.request.max_tokens - sequence.drawn)
            .min(self.context.saturating_sub(sequence.tokens.len() - sequence.begin));
        let (_, free_pages) = self.cache.pages();
        let ahead = (left + behind).div_ceil(self.cache.page_tokens()) + 1;
        if self.waiting.is_empty() && 2 * ahead <= free_pages && self.cache.reserve(row, left + behind).is_ok() {
            return Some(count);
        }
        if self.cache.reserve(row, count).is_ok() || (self.release_reserved() && self.cache.reserve(row, count).is_ok())
        {
            return Some(count);
        }
        // As many as the pages allow.
        let (_, free_pages) = self.cache.pages();
        let room = self.cache.pages_of(row) + free_pages;
        let fits = (room * self.cache.page_tokens()).saturating_sub(self.cache.length(row)).min(count);
        (fits > 0 && self.cache.reserve(row, fits).is_ok()).then_some(fits)
    }

    /// Frees pages reserved in advance. Returns whether there were any.
    fn release_reserved(&mut self) -> bool {
        let (_, before) = self.cache.pages();
        let rows = self.running.iter().filter_map(|sequence| Some((sequence.row?, sequence.scheduled)));
        rows.for_each(|(row, prefills)| self.cache.release(row, prefills));
        self.cache.pages().1 > before
    }

    /// Admits the first waiting sequence, with the longest cached prefix.
    fn admit(&mut self, has_slot: bool) {
        let Some(mut sequence) = self.waiting.pop_front() else { return };
        // Prompt log-probabilities need the whole prompt computed.
        sequence.row = Some(match sequence.awaits_prompt() {
            true => self.cache.add_row(),
            false => self.cache.add_row_with_prefix(&sequence.tokens[sequence.begin..]),
        });
        if !sequence.was_admitted {
            sequence.was_admitted = true;
            sequence.cached = sequence.row.map(|row| self.cache.length(row));
        }
        sequence.has_slot = has_slot;
        if sequence.needs_line() {
            let line = self.free_line();
            if let Some(counts) = &mut self.counts {
                let (prompt, written) = sequence.tokens.split_at(sequence.prompt_length());
                counts.begin(line, prompt, written, &sequence.request.biases);
            }
            sequence.line = Some(line);
        }
        self.running.push(sequence);
    }

    /// A free row of token counts.
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

    /// Preempts a sequence: it releases its pages and waits to be recomputed.
    fn preempt(&mut self) -> Result<(), Failure> {
        // All of its tokens have to be known.
        self.read(0)?;
        let Some(at) = self.victim() else { return Ok(()) };
        self.preemptions += 1;
        let is_last = at + 1 == self.running.len();
        let sequence = self.running.remove(at);
        let mut sequence = self.release(sequence);
        if is_last {
            self.waiting.push_front(sequence);
        } else {
            // Later sequences keep their rows.
            sequence.arrival = self.arrive();
            self.waiting.push_back(sequence);
        }
        Ok(())
    }

    /// The last sequence of the client with the most pages.
    fn victim(&self) -> Option<usize> {
        let pages = |sequence: &Sequence| sequence.row.map_or(0, |row| self.cache.pages_of(row));
        let mut of_clients: Vec<(u64, usize)> = Vec::new();
        for sequence in self.running.iter().rev() {
            match of_clients.iter_mut().find(|(client, _)| *client == sequence.request.client) {
                Some((_, held)) => *held += pages(sequence),
                None => of_clients.push((sequence.request.client, pages(sequence))),
            }
        }
        // With several maxima, the client of the last sequence.
        let most = of_clients.iter().map(|(_, held)| *held).max()?;
        let (client, _) = of_clients.into_iter().find(|(_, held)| *held == most)?;
        self.running.iter().rposition(|sequence| sequence.request.client == client)
    }

    /// Releases the row and the counts of a sequence.
    pub(super) fn release(&mut self, mut sequence: Sequence) -> Sequence {
        if let Some(row) = sequence.row.take() {
            // A stop token at the end of a multi-step call is not computed: the cache lacks its
            // keys.
            let read = &sequence.tokens[sequence.begin..];
            let read = match read.split_last() {
                Some((last, before)) if sequence.request.stop_tokens.contains(last) => before,
                _ => read,
            };
            self.cache.share_prefix(row, read);
            self.cache.remove_row(row);
        }
        self.free_lines.extend(sequence.line.take());
        sequence.drawn_at = None;
        sequence
    }
}
