"""What a server, or the network to it, says when it does not do what it is asked to: whether to ask again could help,
and what a person can do.

fsspec's backends raise Python's own errors (FileNotFoundError, PermissionError) and those of the packages beneath them.
For S3 the server's own word for it lies in the cause:
https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html
"""

from __future__ import annotations

_FINAL = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, NotImplementedError, ValueError)
_CLIENTS = ("botocore", "aiobotocore", "aiohttp", "http", "urllib3", "gcsfs", "google", "azure", "asyncio", "fsspec")
_REGION = "the bucket lies in another region: set AWS_DEFAULT_REGION to its own"
_KEYS = "check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or the profile that AWS_PROFILE names"
_RIGHTS = "these credentials may not do that here: ask for the right, or use others"
_EXPIRED = "get new credentials"
_REACH = "is the network up, and AWS_ENDPOINT_URL right?"

_FINAL_WORDS = {
    "301": _REGION,
    "AuthorizationHeaderMalformed": _REGION,
    "IllegalLocationConstraintException": _REGION,
    "PermanentRedirect": _REGION,
    "403": _RIGHTS,
    "AccessDenied": _RIGHTS,
    "AllAccessDisabled": _RIGHTS,
    "InvalidAccessKeyId": _KEYS,
    "SignatureDoesNotMatch": _KEYS,
    "ExpiredToken": _EXPIRED,
    "InvalidToken": _EXPIRED,
    "TokenRefreshRequired": _EXPIRED,
    "RequestTimeTooSkewed": "this machine's clock is wrong: set it",
    "NoSuchBucket": "make it, or correct its name",
    "InvalidBucketName": "correct its name",
    "400": "",
    "405": "",
    "416": "",
    "EntityTooLarge": "",
    "InvalidArgument": "",
    "InvalidRange": "",
    "InvalidRequest": "",
    "KeyTooLongError": "",
    "MethodNotAllowed": "",
    "NotImplemented": "",
}
"""What S3 will say again when it is asked again -> what to do."""
_FINAL_KINDS = {
    "NoCredentialsError": _KEYS,
    "PartialCredentialsError": _KEYS,
    "ProfileNotFound": "correct AWS_PROFILE",
    "NoRegionError": "set AWS_DEFAULT_REGION",
}
"""What the packages will say again, by the names of their classes."""
_OTHER_KINDS = {"EndpointConnectionError": _REACH, "ConnectTimeoutError": _REACH, "ProxyConnectionError": _REACH}
NO_SUCH_UPLOAD = "NoSuchUpload"
NO_SUCH_BUCKET = "NoSuchBucket"


def word_of(error: BaseException) -> str:
    """The server's own word for an error ("SlowDown", "NoSuchBucket", "404"); empty where it has none."""
    for one in (error, error.__cause__):
        response = getattr(one, "response", None)
        if isinstance(response, dict):
            return str(response.get("Error", {}).get("Code", ""))
    return ""


def is_of_network(error: BaseException) -> bool:
    """Whether a server, a network, a disk, or a package that speaks to them says so: a timeout is an OSError; what
    these packages raise has no class in common, so it is known by the module of its class."""
    return isinstance(error, OSError) or (
        isinstance(error, Exception) and type(error).__module__.partition(".")[0] in _CLIENTS
    )


def is_final(error: BaseException) -> bool:
    """Whether to try again would change nothing. A timeout is an OSError, a lack of credentials none."""
    word = word_of(error)
    if word == NO_SUCH_UPLOAD:  # all parts are sent again; what had begun is forgotten, or done already
        return False
    return isinstance(error, _FINAL) or word in _FINAL_WORDS or type(error).__name__ in _FINAL_KINDS


def in_words(error: BaseException) -> str:
    """One line: what was said, and what to do about it where that is known."""
    told = error.strerror if isinstance(error, OSError) and error.strerror and error.filename is None else str(error)
    said = (told.strip() or type(error).__name__).splitlines()[0].rstrip(".")
    word, kind = word_of(error), type(error).__name__
    if isinstance(error, FileNotFoundError):
        known = {NO_SUCH_BUCKET: "there is no such bucket", "NoSuchKey": "there is no such object"}
        said = known.get(word, "there is no such object, or no such bucket")
    advice = _FINAL_WORDS.get(word) or _FINAL_KINDS.get(kind) or _OTHER_KINDS.get(kind)
    return f"{said} ({advice})" if advice else said
