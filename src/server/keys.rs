//! Client identity: API keys and addresses.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::net::{IpAddr, Ipv6Addr};
use std::sync::{PoisonError, RwLock};

use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

use crate::failure::Failure;

/// The client of a request: its key, or its address if no key is required.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Client {
    Key(usize),
    Address(IpAddr),
}

impl Client {
    /// The client of an address. An IPv6 client is a network of 64 bits, since one machine may use
    /// all of its addresses.
    pub(super) fn of_address(address: IpAddr) -> Self {
        Self::Address(match address.to_canonical() {
            IpAddr::V6(address) => IpAddr::V6(Ipv6Addr::from_bits(address.to_bits() >> 64 << 64)),
            address @ IpAddr::V4(_) => address,
        })
    }

    /// A number of a client, with rare collisions.
    pub(super) fn number(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        self.hash(&mut hasher);
        hasher.finish()
    }
}

/// The valid keys, which may be replaced while the server runs.
pub(super) struct Keys(RwLock<Vec<[u8; 32]>>);

impl Keys {
    pub(super) fn new(keys: &[String]) -> Result<Self, Failure> {
        Ok(Self(RwLock::new(digests(keys)?)))
    }

    /// Replaces the keys.
    ///
    /// # Errors
    /// If a key is empty, if none is left, which would admit everyone, or if there were none. The
    /// old keys stay then.
    pub(super) fn replace(&self, keys: &[String]) -> Result<(), Failure> {
        let new = digests(keys)?;
        let mut held = self.0.write().unwrap_or_else(PoisonError::into_inner);
        if new.is_empty() != held.is_empty() {
            return Err(Failure::usage("a reload cannot add the first key or remove the last one"));
        }
        *held = new;
        Ok(())
    }

    /// Whether no key is required.
    pub(super) fn is_empty(&self) -> bool {
        self.0.read().unwrap_or_else(PoisonError::into_inner).is_empty()
    }

    /// The index of the key. Compares in constant time.
    pub(super) fn find(&self, key: &str) -> Option<usize> {
        let given: [u8; 32] = Sha256::digest(key.as_bytes()).into();
        let mut found = None;
        for (at, key) in self.0.read().unwrap_or_else(PoisonError::into_inner).iter().enumerate() {
            if bool::from(key.ct_eq(&given)) {
                found = Some(at);
            }
        }
        found
    }
}

fn digests(keys: &[String]) -> Result<Vec<[u8; 32]>, Failure> {
    if keys.iter().any(|key| key.trim().is_empty()) {
        return Err(Failure::usage("an API key is empty"));
    }
    Ok(keys.iter().map(|key| Sha256::digest(key.as_bytes()).into()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_one_ipv6_network_are_one_client() {
        let client = |address: &str| Client::of_address(address.parse().expect("an address"));
        assert_eq!(client("2001:db8:1:2::5"), client("2001:db8:1:2:3:4:5:6"));
        assert_ne!(client("2001:db8:1:2::5"), client("2001:db8:1:3::5"));
        assert_eq!(client("::ffff:127.0.0.2"), client("127.0.0.2"));
        assert_ne!(client("127.0.0.2"), client("127.0.0.1"));
    }

    #[test]
    fn a_key_is_found_whole_only() {
        let keys = Keys::new(&["kiln".into(), "glaze".into()]).expect("keys");
        assert_eq!(keys.find("glaze"), Some(1));
        assert_eq!(["", "kil", "kiln ", "Kiln"].map(|key| keys.find(key)), [None; 4]);
        assert!(Keys::new(&[" ".into()]).is_err());
        assert!(keys.replace(&[]).is_err(), "everyone would get in");
        keys.replace(&["wheel".into()]).expect("keys");
        assert_eq!((keys.find("glaze"), keys.find("wheel")), (None, Some(0)));
    }
}
