//! Page allocation and prefix sharing, on the host.

use std::collections::{BTreeMap, HashMap};

/// The tokens of a full page, and the prefix before it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Prefix {
    before: Option<u64>,
    tokens: Box<[u32]>,
}

/// A page.
#[derive(Debug, Default)]
struct Page {
    /// Number of rows that use it.
    rows: u32,
    /// Its prefix with its id, once registered.
    known: Option<(u64, Prefix)>,
    /// When it was last freed.
    freed_at: u64,
}

/// The pages of a cache. A free page keeps its registered prefix until it is needed; the least
/// recently freed page is reused first.
#[derive(Debug)]
pub(super) struct Pages {
    page_tokens: usize,
    pages: Vec<Page>,
    /// Free pages without prefix.
    free: Vec<u32>,
    /// Free pages with a prefix, by the time they were freed.
    idle: BTreeMap<u64, u32>,
    by_prefix: HashMap<Prefix, u32>,
    /// Counters of prefix ids, and of freed pages.
    numbers: u64,
    moments: u64,
}

impl Pages {
    pub(super) fn new(count: usize, page_tokens: usize) -> Self {
        Self {
            page_tokens,
            pages: (0..count).map(|_| Page::default()).collect(),
            free: (0..count as u32).rev().collect(),
            idle: BTreeMap::new(),
            by_prefix: HashMap::new(),
            numbers: 0,
            moments: 0,
        }
    }

    /// Number of free pages.
    pub(super) fn available(&self) -> usize {
        self.free.len() + self.idle.len()
    }

    pub(super) fn count(&self) -> usize {
        self.pages.len()
    }

    /// Allocates a page, if any is free.
    pub(super) fn take(&mut self) -> Option<u32> {
        let page = self.free.pop().or_else(|| {
            let (_, page) = self.idle.pop_first()?;
            self.forget(page);
            Some(page)
        })?;
        self.pages[page as usize].rows = 1;
        Some(page)
    }

    /// Adds a user to a page.
    fn share(&mut self, page: u32) {
        let held = &mut self.pages[page as usize];
        if held.rows == 0 {
            self.idle.remove(&held.freed_at);
        }
        held.rows += 1;
    }

    /// Removes a user from pages, last page first.
    pub(super) fn free_pages(&mut self, pages: &[u32]) {
        for page in pages.iter().rev() {
            let held = &mut self.pages[*page as usize];
            held.rows -= 1;
            if held.rows == 0 {
                self.moments += 1;
                held.freed_at = self.moments;
                match held.known {
                    Some(_) => drop(self.idle.insert(self.moments, *page)),
                    None => self.free.push(*page),
                }
            }
        }
    }

    /// Shares the pages with the longest registered prefix of `tokens`, all but one token at most.
    pub(super) fn shared(&mut self, tokens: &[u32]) -> Vec<u32> {
        let mut found = Vec::new();
        let mut before = None;
        for tokens in tokens[..tokens.len().saturating_sub(1)].chunks_exact(self.page_tokens) {
            let prefix = Prefix { before, tokens: tokens.into() };
            let Some(page) = self.by_prefix.get(&prefix).copied() else { break };
            before = self.pages[page as usize].known.as_ref().map(|(number, _)| *number);
            self.share(page);
            found.push(page);
        }
        found
    }

    /// Registers the tokens of a row's full pages, for sharing.
    pub(super) fn share_prefix(&mut self, pages: &[u32], tokens: &[u32]) {
        let mut before = None;
        for (page, tokens) in pages.iter().zip(tokens.chunks_exact(self.page_tokens)) {
            let prefix = Prefix { before, tokens: tokens.into() };
            let known = match self.by_prefix.get(&prefix) {
                Some(known) => *known,
                None => {
                    // Update the page's prefix. It may have changed: when the page before it
                    // belonged to another row that is gone.
                    self.forget(*page);
                    self.numbers += 1;
                    self.by_prefix.insert(prefix.clone(), *page);
                    self.pages[*page as usize].known = Some((self.numbers, prefix));
                    *page
                }
            };
            before = self.pages[known as usize].known.as_ref().map(|(number, _)| *number);
        }
    }

    fn forget(&mut self, page: u32) {
        if let Some((_, prefix)) = self.pages[page as usize].known.take() {
            self.by_prefix.remove(&prefix);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_that_begin_alike_share_full_pages() {
        let mut pages = Pages::new(8, 4);
        let tokens: Vec<u32> = (0..11).collect();
        let first: Vec<u32> = (0..3).map(|_| pages.take().expect("a page")).collect();
        pages.share_prefix(&first, &tokens);
        assert_eq!(pages.shared(&tokens), first[..2]);
        // At least one token is computed again: the next one is predicted from it.
        assert_eq!(pages.shared(&tokens[..8]), first[..1]);
        assert!(pages.shared(&tokens[..4]).is_empty());
        // The second page depends on the first.
        let other: Vec<u32> = [9, 9, 9, 9].iter().chain(&tokens[4..]).copied().collect();
        assert!(pages.shared(&other).is_empty());
        assert_eq!(pages.available(), 5);
    }

    #[test]
    fn known_pages_stay_until_they_are_needed_the_end_of_a_text_first() {
        let mut pages = Pages::new(3, 2);
        let row: Vec<u32> = (0..3).map(|_| pages.take().expect("a page")).collect();
        pages.share_prefix(&row, &[1, 2, 3, 4, 5, 6]);
        assert_eq!(pages.take(), None);
        pages.free_pages(&row);
        assert_eq!(pages.available(), 3);
        assert_eq!(pages.take(), Some(row[2]));
        assert_eq!(pages.shared(&[1, 2, 3, 4, 5, 6, 7]), row[..2]);
        assert_eq!(pages.available(), 0);
        pages.free_pages(&row[..2]);
        assert_eq!(pages.take(), Some(row[1]));
        assert_eq!(pages.shared(&[1, 2, 3, 4, 5]), row[..1]);
    }

    #[test]
    fn a_page_that_follows_another_rows_page_has_one_prefix_when_that_page_is_gone() {
        let mut pages = Pages::new(4, 1);
        let take =
            |pages: &mut Pages, count: usize| (0..count).map(|_| pages.take().expect("a page")).collect::<Vec<u32>>();
        // Two rows compute the same tokens at the same time; the first row's page is registered.
        let (first, second) = (take(&mut pages, 1), take(&mut pages, 2));
        pages.share_prefix(&first, &[1]);
        pages.share_prefix(&second, &[1, 2]);
        pages.free_pages(&first);
        // The remaining pages are needed, and the first row's page is reused.
        let others = take(&mut pages, 2);
        pages.share_prefix(&second, &[1, 2]);
        pages.free_pages(&second);
        assert_eq!(take(&mut pages, 2).len(), 2);
        assert!(pages.shared(&[1, 2, 3]).is_empty(), "pages that were taken hold other tokens");
        assert_eq!(pages.available(), 0);
        pages.free_pages(&others);
        assert_eq!(pages.available(), 2);
    }

    #[test]
    fn a_hundred_thousand_rows_that_come_and_go_leave_nothing_behind() {
        let mut pages = Pages::new(64, 4);
        let mut rows: Vec<(Vec<u32>, Vec<u32>)> = Vec::new();
        let mut state = 1u64;
        let mut next = |below: u64| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 33) % below
        };
        for _ in 0..100_000 {
            let tokens: Vec<u32> = (0..next(40)).map(|_| next(2) as u32).collect();
            let mut row = pages.shared(&tokens);
            while row.len() * 4 < tokens.len() {
                match pages.take() {
                    Some(page) => row.push(page),
                    None => break,
                }
            }
            // Registers a part of a row's tokens now, and all of them after other rows have come
            // and gone.
            pages.share_prefix(&row, &tokens[..tokens.len().min(next(40) as usize)]);
            rows.push((row, tokens));
            if rows.len() > 6 {
                let at = next(7) as usize;
                let (row, tokens) = rows.swap_remove(at);
                pages.share_prefix(&row, &tokens);
                pages.free_pages(&row);
            }
            let owned = rows.iter().flat_map(|(row, _)| row);
            assert!(owned.clone().all(|page| !pages.free.contains(page)), "a page that a row has is not free");
            for (page, held) in pages.pages.iter().enumerate() {
                let owners = owned.clone().filter(|owned| **owned as usize == page).count();
                assert_eq!(owners, held.rows as usize, "page {page} counts the rows that have it");
            }
        }
        rows.iter().for_each(|(row, _)| pages.free_pages(row));
        assert_eq!(pages.available(), 64);
        assert_eq!(pages.idle.len(), pages.by_prefix.len());
        assert!(pages.pages.iter().all(|page| page.rows == 0));
    }
}
