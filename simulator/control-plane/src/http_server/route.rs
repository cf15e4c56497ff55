//! Paths of the API.

/// What a path leads to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Route<'a> {
    /// Discovery, health, version.
    Document(Vec<&'a str>),
    /// A resource or one of its objects.
    Resource(Found),
}

/// A resource path taken apart.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Found {
    pub(super) group: String,
    pub(super) version: String,
    pub(super) namespace: String,
    pub(super) plural: String,
    pub(super) name: String,
    pub(super) subresource: String,
}

pub(super) fn parse(path: &str) -> Route<'_> {
    let parts: Vec<&str> = path.split('/').filter(|p| !p.is_empty()).collect();
    let (group, version, rest) = match parts.as_slice() {
        ["api", version, rest @ ..] if !rest.is_empty() => ("", *version, rest),
        ["apis", group, version, rest @ ..] if !rest.is_empty() => (*group, *version, rest),
        _ => return Route::Document(parts),
    };
    let mut found = Found { group: group.to_owned(), version: version.to_owned(), ..Found::default() };
    let rest = match rest {
        // Namespaces themselves, with their subresources.
        ["namespaces"] | ["namespaces", _] | ["namespaces", _, "status" | "finalize"] if group.is_empty() => {
            rest
        }
        ["namespaces", namespace, rest @ ..] if !rest.is_empty() => {
            found.namespace = (*namespace).to_owned();
            rest
        }
        _ => rest,
    };
    let mut rest = rest.iter();
    let mut next = || rest.next().map(|s| (*s).to_owned()).unwrap_or_default();
    found.plural = next();
    found.name = next();
    found.subresource = next();
    Route::Resource(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(path: &str) -> Found {
        match parse(path) {
            Route::Resource(f) => f,
            Route::Document(d) => panic!("{d:?}"),
        }
    }

    #[test]
    fn paths_are_taken_apart() {
        let f = found("/apis/resource.k8s.io/v1/namespaces/a/resourceclaims/c/status");
        assert_eq!((f.namespace.as_str(), f.plural.as_str(), f.name.as_str()), ("a", "resourceclaims", "c"));
        assert_eq!(f.subresource, "status");
        let f = found("/api/v1/namespaces/a");
        assert_eq!((f.namespace.as_str(), f.plural.as_str(), f.name.as_str()), ("", "namespaces", "a"));
        let f = found("/api/v1/namespaces/a/pods");
        assert_eq!((f.namespace.as_str(), f.plural.as_str(), f.name.as_str()), ("a", "pods", ""));
        let f = found("/api/v1/namespaces/a/finalize");
        assert_eq!((f.plural.as_str(), f.subresource.as_str()), ("namespaces", "finalize"));
        assert_eq!(parse("/apis/apps/v1"), Route::Document(vec!["apis", "apps", "v1"]));
    }
}
