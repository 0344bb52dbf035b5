//! Embedded data sets, each a generator and its grammar.

pub(crate) mod chats;
pub(crate) mod home;
pub(crate) mod names;
pub(crate) mod stories;
