//! The webhook's own certificate: an authority that signs one leaf and is thrown away.
//!
//! Authority and leaf are renewed together, after two thirds of their life. The bundle that the API server
//! gets also contains the previous authority, so that replicas that still serve the old leaf stay trusted.
//! They serve the new leaf once the API server has had time to learn of the new authority. Nothing that could
//! sign another certificate is stored.

use aliquot_model::names::{
    CERTIFICATE_EXPIRES as EXPIRES, CERTIFICATE_MADE as MADE, CERTIFICATE_NAMES as NAMES,
};
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use k8s_openapi::jiff::Timestamp;
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, SerialNumber,
};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::sign::CertifiedKey;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

/// The life of certificates whose Secret does not state when they expire.
const YEAR: Duration = Duration::from_secs(365 * 24 * 3600);
/// How far before now a certificate becomes valid, for clients whose clocks are behind.
const BEHIND: Duration = Duration::from_secs(24 * 3600);

const CA: &str = "ca.crt";
const CERTIFICATE: &str = "tls.crt";
const KEY: &str = "tls.key";

/// The certificate that is served, and the authorities that the API server must trust.
#[derive(Debug, Clone)]
pub struct Certificate {
    /// Leaf and key.
    pub key: Arc<CertifiedKey>,
    /// Authorities, in PEM.
    pub bundle: String,
    made: Timestamp,
    expires: Timestamp,
    names: String,
}

/// The reason why there is no certificate.
#[derive(Debug, thiserror::Error)]
pub enum CertificateError {
    /// The Secret was not written by this driver, or is damaged.
    #[error("Secret {name} has no usable {what}; delete it and a new one is made")]
    Unusable {
        /// The name of the Secret.
        name: String,
        /// The unusable part.
        what: String,
    },
    /// Making a certificate failed.
    #[error("making a certificate: {0}")]
    Making(#[from] rcgen::Error),
}

impl Certificate {
    /// Reads the certificate from the Secret that the replicas share. Returns an error that names the
    /// unusable part.
    pub fn read(secret: &Secret) -> Result<Self, CertificateError> {
        let name = secret.metadata.name.clone().unwrap_or_default();
        let fail = |what: &str| CertificateError::Unusable { name: name.clone(), what: what.to_owned() };
        let field = |key: &str| {
            secret
                .data
                .as_ref()
                .and_then(|data| data.get(key))
                .map(|value| value.0.as_slice())
                .ok_or_else(|| fail(key))
        };
        let note = |key: &str| secret.metadata.annotations.as_ref().and_then(|all| all.get(key)).cloned();
        let chain: Vec<CertificateDer<'static>> = CertificateDer::pem_slice_iter(field(CERTIFICATE)?)
            .collect::<Result<_, _>>()
            .map_err(|_| fail(CERTIFICATE))?;
        let key = PrivateKeyDer::from_pem_slice(field(KEY)?).map_err(|_| fail(KEY))?;
        let key = rustls::crypto::ring::sign::any_supported_type(&key).map_err(|_| fail(KEY))?;
        if chain.is_empty() {
            return Err(fail(CERTIFICATE));
        }
        let bundle = std::str::from_utf8(field(CA)?).map_err(|_| fail(CA))?.to_owned();
        let made: Timestamp = note(MADE).and_then(|made| made.parse().ok()).ok_or_else(|| fail(MADE))?;
        let expires = match note(EXPIRES) {
            Some(expires) => expires.parse().map_err(|_| fail(EXPIRES))?,
            None => made.saturating_add(YEAR).map_err(|_| fail(MADE))?,
        };
        Ok(Self {
            key: Arc::new(CertifiedKey::new(chain, key)),
            bundle,
            made,
            expires,
            names: note(NAMES).unwrap_or_default(),
        })
    }

    /// Returns true if the certificate has to be renewed: it is for other names, or no longer fresh.
    pub fn is_stale(&self, names: &[String], life: Duration, now: Timestamp) -> bool {
        self.fresh_for(life, now).is_zero() || self.names != names.join(",")
    }

    /// Returns what is left of two thirds of the certificate's life, or of the life that is configured now if
    /// that is shorter.
    pub fn fresh_for(&self, life: Duration, now: Timestamp) -> Duration {
        let own = self.expires.duration_since(self.made).unsigned_abs();
        let age = now.duration_since(self.made);
        let age = if age.is_negative() { Duration::ZERO } else { age.unsigned_abs() };
        (life.min(own) / 3 * 2).saturating_sub(age)
    }

    /// Returns true if a client that trusts this bundle accepts another certificate.
    pub(super) fn vouches_for(&self, other: &Self) -> bool {
        first_certificate(&other.bundle).is_some_and(|authority| self.bundle.contains(authority))
    }
}

/// Makes a certificate for these names with this life, as the Secret in which the replicas share it. The
/// first authority of the previous bundle stays trusted.
pub(super) fn make(
    name: &str,
    namespace: &str,
    names: &[String],
    life: Duration,
    previous: Option<&Certificate>,
    now: Timestamp,
) -> Result<Secret, CertificateError> {
    let (Ok(from), Ok(until)) = (now.saturating_sub(BEHIND), now.saturating_add(life)) else {
        let what = "time: the clock is far off".to_owned();
        return Err(CertificateError::Unusable { name: name.to_owned(), what });
    };
    // rcgen has its own type for points in time, which only its functions name.
    let date = |at: Timestamp| {
        let seconds = u64::try_from(at.as_second()).unwrap_or(0);
        rcgen::date_time_ymd(1970, 1, 1) + Duration::from_secs(seconds)
    };
    let serial = || SerialNumber::from_slice(uuid::Uuid::new_v4().as_bytes());
    let mut authority = CertificateParams::default();
    authority.distinguished_name.push(DnType::CommonName, "aliquot webhook authority");
    authority.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    authority.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::DigitalSignature];
    (authority.not_before, authority.not_after) = (date(from), date(until));
    authority.serial_number = Some(serial());
    let authority_key = KeyPair::generate()?;
    let authority_certificate = authority.self_signed(&authority_key)?;
    let issuer = Issuer::new(authority, authority_key);

    let mut leaf = CertificateParams::new(names.to_vec())?;
    let common = names.first().map_or("aliquot-webhook", String::as_str);
    // Common names are at most 64 bytes; only the alternative names count.
    leaf.distinguished_name
        .push(DnType::CommonName, common.get(..common.len().min(64)).unwrap_or("aliquot-webhook"));
    leaf.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    leaf.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    leaf.use_authority_key_identifier_extension = true;
    (leaf.not_before, leaf.not_after) = (date(from), date(until));
    leaf.serial_number = Some(serial());
    let leaf_key = KeyPair::generate()?;
    let leaf = leaf.signed_by(&leaf_key, &issuer)?;

    let mut bundle = authority_certificate.pem();
    if let Some(previous) = previous.and_then(|previous| first_certificate(&previous.bundle)) {
        bundle.push_str(previous);
    }
    let bytes = |text: String| ByteString(text.into_bytes());
    Ok(Secret {
        metadata: ObjectMeta {
            name: Some(name.to_owned()),
            namespace: Some(namespace.to_owned()),
            annotations: Some(BTreeMap::from([
                (MADE.to_owned(), now.to_string()),
                (EXPIRES.to_owned(), until.to_string()),
                (NAMES.to_owned(), names.join(",")),
            ])),
            ..ObjectMeta::default()
        },
        type_: Some("kubernetes.io/tls".to_owned()),
        data: Some(BTreeMap::from([
            (CA.to_owned(), bytes(bundle)),
            (CERTIFICATE.to_owned(), bytes(leaf.pem())),
            (KEY.to_owned(), bytes(leaf_key.serialize_pem())),
        ])),
        ..Secret::default()
    })
}

fn first_certificate(bundle: &str) -> Option<&str> {
    const END: &str = "-----END CERTIFICATE-----";
    let end = bundle.find(END)? + END.len();
    // The line break at the end belongs to the certificate.
    let end = bundle.get(end..)?.find('\n').map_or(end, |newline| end + newline + 1);
    bundle.get(..end)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustls::client::WebPkiServerVerifier;
    use rustls::client::danger::ServerCertVerifier;
    use rustls::pki_types::{ServerName, UnixTime};
    use rustls::{CertificateError as TlsError, RootCertStore};

    fn now() -> Timestamp {
        Timestamp::now()
    }

    fn names() -> Vec<String> {
        vec!["hook.aliquot-system.svc".to_owned(), "127.0.0.1".to_owned()]
    }

    fn made(previous: Option<&Certificate>) -> Certificate {
        Certificate::read(&make("s", "ns", &names(), YEAR, previous, now()).expect("made")).expect("read")
    }

    fn trusts(bundle: &str, certificate: &Certificate, name: &str) -> Result<(), rustls::Error> {
        let since_1970 = u64::try_from(now().as_second()).expect("after 1970");
        trusts_at(bundle, certificate, name, Duration::from_secs(since_1970))
    }

    fn trusts_at(
        bundle: &str,
        certificate: &Certificate,
        name: &str,
        at: Duration,
    ) -> Result<(), rustls::Error> {
        let mut roots = RootCertStore::empty();
        for root in CertificateDer::pem_slice_iter(bundle.as_bytes()) {
            roots.add(root.expect("PEM")).expect("an authority");
        }
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let verifier = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider)
            .build()
            .expect("a verifier");
        let name = ServerName::try_from(name.to_owned()).expect("a name");
        let leaf = certificate.key.cert.first().expect("a leaf");
        verifier.verify_server_cert(leaf, &[], &name, &[], UnixTime::since_unix_epoch(at)).map(drop)
    }

    #[test]
    fn a_client_that_trusts_the_bundle_accepts_the_leaf_for_its_names_only() {
        let certificate = made(None);
        for name in names() {
            assert_eq!(trusts(&certificate.bundle, &certificate, &name), Ok(()), "{name}");
        }
        assert!(trusts(&certificate.bundle, &certificate, "other.example.com").is_err());
        let stranger = made(None);
        // Another authority may have the same name, if it was made in the same second; never the same key.
        let refused = trusts(&stranger.bundle, &certificate, "127.0.0.1");
        assert!(
            matches!(
                refused,
                Err(rustls::Error::InvalidCertificate(TlsError::UnknownIssuer | TlsError::BadSignature))
            ),
            "{refused:?}"
        );
    }

    #[test]
    fn after_a_renewal_the_previous_leaf_is_still_trusted_and_the_one_before_it_is_not() {
        let first = made(None);
        let second = made(Some(&first));
        let third = made(Some(&second));
        for old in [&first, &second] {
            assert_eq!(trusts(&second.bundle, old, "127.0.0.1"), Ok(()));
        }
        assert_eq!(trusts(&third.bundle, &second, "127.0.0.1"), Ok(()));
        assert!(trusts(&third.bundle, &first, "127.0.0.1").is_err());
    }

    #[test]
    fn it_is_renewed_after_two_thirds_of_its_time_and_for_other_names() {
        let certificate = made(None);
        let after =
            |days: u64| now().saturating_add(Duration::from_secs(days * 24 * 3600)).expect("in range");
        assert!(!certificate.is_stale(&names(), YEAR, now()));
        assert!(certificate.is_stale(&["other".to_owned()], YEAR, now()));
        assert!(!certificate.is_stale(&names(), YEAR, after(242)));
        assert!(certificate.is_stale(&names(), YEAR, after(244)));
        assert_eq!(certificate.fresh_for(YEAR, after(244)), Duration::ZERO);
        assert!(certificate.fresh_for(YEAR, after(243)) < Duration::from_secs(24 * 3600));
        // What certificates last now counts for one that was made for longer, not for one made for less.
        assert!(certificate.is_stale(&names(), YEAR / 12, after(21)));
        assert!(certificate.is_stale(&names(), YEAR * 2, after(244)));
    }

    #[test]
    fn it_lasts_to_the_second() {
        let (now, life) = (now(), Duration::from_secs(90));
        let certificate =
            Certificate::read(&make("s", "ns", &names(), life, None, now).expect("made")).expect("read");
        let at = |seconds: u64| {
            let since_1970 = u64::try_from(now.as_second()).expect("after 1970") + seconds;
            trusts_at(&certificate.bundle, &certificate, "127.0.0.1", Duration::from_secs(since_1970))
        };
        assert_eq!(at(89), Ok(()));
        let refused = at(91);
        assert!(
            matches!(
                refused,
                Err(rustls::Error::InvalidCertificate(TlsError::ExpiredContext { .. } | TlsError::Expired))
            ),
            "{refused:?}"
        );
    }

    #[test]
    fn one_of_before_that_does_not_say_until_when_lasts_a_year() {
        let mut secret = make("s", "ns", &names(), YEAR * 2, None, now()).expect("made");
        secret.metadata.annotations.as_mut().expect("annotations").remove(EXPIRES);
        let certificate = Certificate::read(&secret).expect("read");
        let later = now().saturating_add(YEAR / 4 * 3).expect("in range");
        assert!(certificate.is_stale(&names(), YEAR * 2, later));
    }

    #[test]
    fn a_damaged_secret_is_told_by_name() {
        let mut secret = make("s", "ns", &names(), YEAR, None, now()).expect("made");
        secret.data.as_mut().expect("data").insert(KEY.to_owned(), ByteString(b"nonsense".to_vec()));
        let error = Certificate::read(&secret).expect_err("damaged");
        assert_eq!(error.to_string(), "Secret s has no usable tls.key; delete it and a new one is made");
    }
}
