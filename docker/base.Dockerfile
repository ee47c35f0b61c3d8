# The base that docker/base.sh made, as an image. Context: the folder with base.tar.
FROM scratch
ADD base.tar /
CMD ["python3"]
